"""Read JSON that may be damaged.

It may be truncated by a full disk, edited, or from an untrusted source.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kd.core.errors import KdError, RunError, error_summary

Value = TypeVar("Value")
DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of JSON that is truncated, is not UTF-8, is nested too deep, or has unexpected
values.
"""


def object_of(content: Any) -> Any:
    """Return JSON that is an object, {key: value}; TypeError: it is not one."""
    if not isinstance(content, dict):
        raise TypeError("no JSON object")
    return content


def read_json(
    file: Path,
    config_path: str,
    remedy: str,
    build: Callable[[Any], Value] = object_of,
    kind: type[KdError] = RunError,
    required: bool = False,
) -> Value:
    """Read a JSON file and return `build(content)`, by default an object.

    OSError: it cannot be read.

    If the file is damaged (`build` raises one of `DAMAGE`), or `required` and cannot be
    read, raise `kind` at the config path `config_path`.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        if required:
            raise kind(
                config_path, f"'{file}' cannot be read ({error.strerror})", "", remedy
            ) from error
        raise
    try:
        return build(json.loads(content))
    except DAMAGE as error:
        raise kind(
            config_path, f"'{file}' is damaged ({error_summary(error)})", "", remedy
        ) from error
