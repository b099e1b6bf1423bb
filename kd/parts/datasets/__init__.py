"""Sources of images. A source of your own is a `Storage` that reads one image, and a
call of `source`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kd.parts.datasets._columns import Names, Repeated
    from kd.parts.datasets._source import (
        LabelColumn,
        Listed,
        SplitRequest,
        Storage,
        source,
    )

__all__ = [
    "LabelColumn",
    "Listed",
    "Names",
    "Repeated",
    "SplitRequest",
    "Storage",
    "source",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the painters of `food_mini` need no
    torch.
    """
    if name not in __all__:
        raise AttributeError(name)
    module = "_columns" if name in ("Names", "Repeated") else "_source"
    return getattr(import_module(f"{__name__}.{module}"), name)
