"""One reader of JSON that may be damaged: cut short by a full disk, edited, or written by a stranger."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kd.core.errors import KdError, RunError, named

Value = TypeVar("Value")
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of JSON that is cut short, is not UTF-8, is nested too deep, or has other values than were written."""


def object_of(content: Any) -> Any:
    """Return JSON that is an object, {key: value}; TypeError: it is not one."""
    if not isinstance(content, dict):
        raise TypeError("no JSON object")
    return content


def read_json(
    file: Path, where: str, remedy: str, build: Callable[[Any], Value] = object_of, kind: type[KdError] = RunError
) -> Value:
    """Return what `build` makes of a JSON file, by default an object. OSError: it cannot be read.

    A damaged file, of which `build` raises one of `DAMAGE`, is an error of `kind` at the config path `where`.
    """
    content = file.read_bytes()
    try:
        return build(json.loads(content))
    except DAMAGE as error:
        raise kind(where, f"'{file}' is damaged ({named(error)})", "", remedy) from error
