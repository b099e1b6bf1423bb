"""One reader of JSON that may be damaged: cut short by a full disk, edited, or written by a stranger."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kd.core.errors import KdError, RunError, in_short

Value = TypeVar("Value")
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What is raised by JSON that is cut short, is no UTF-8, is nested too deep, or has other values than were written."""


def object_of(content: Any) -> Any:
    """Return JSON that is an object, {key: value}; TypeError: it is none."""
    if not isinstance(content, dict):
        raise TypeError("no JSON object")
    return content


def read_json(
    file: Path, where: str, remedy: str, build: Callable[[Any], Value] = object_of, kind: type[KdError] = RunError
) -> Value:
    """Return what `build` makes of a JSON file, by default an object. OSError: it cannot be read.

    A damaged file, of which `build` raises one of `DAMAGE`, is an error of `kind` at the config path `where`.
    """
    return parse_json(file.read_bytes(), f"'{file}'", where, remedy, build, kind)


def parse_json(
    content: str | bytes,
    subject: str,
    where: str,
    remedy: str,
    build: Callable[[Any], Value] = object_of,
    kind: type[KdError] = RunError,
) -> Value:
    """Return what `build` makes of JSON that was read; `subject` names it in the error. See `read_json`."""
    try:
        return build(json.loads(content))
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {in_short(error)}"
        raise kind(where, f"{subject} is damaged ({reason})", "", remedy) from error
