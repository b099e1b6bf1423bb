"""Read images from folders, tables and archives.

A source of your own is a `Storage` that reads one image, and a call of `source`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kd.parts.datasets._columns import Categorical, Names
    from kd.parts.datasets._source import (
        ImageSource,
        LabelColumn,
        SplitRequest,
        Storage,
        source,
    )

__all__ = [
    "Categorical",
    "ImageSource",
    "LabelColumn",
    "Names",
    "SplitRequest",
    "Storage",
    "source",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `food_mini` paints without torch."""
    if name not in __all__:
        raise AttributeError(name)
    module = "_columns" if name in ("Names", "Categorical") else "_source"
    return getattr(import_module(f"{__name__}.{module}"), name)
