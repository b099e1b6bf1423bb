"""Keys and their accepted values in words, for errors, `kd help` and docs/keys.md."""

import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from kd.config.section import PartSection, kinds
from kd.core.errors import KdError
from kd.core.keys import fields_of

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "a multiple of"}


def keys_of(cls: type, values: Any = None) -> dict[str, FieldInfo]:
    """Return a section's keys by name, with those of the part that `values` name."""
    keys = {name: field for name, field in fields_of(cls).items() if name != "options"}
    if issubclass(cls, PartSection) and isinstance(values, Mapping):
        with suppress(KdError):  # reported by itself
            keys |= fields_of(cls.options_class(values))
    return keys


def section_of(annotation: Any) -> Any:
    """Return the class of a key that holds a section or a list of them, else None."""
    for cls in (annotation, *get_args(annotation)):
        if is_dataclass(cls):
            return cls
    return None


def is_list(annotation: Any) -> bool:
    """Return whether a key holds a list."""
    return get_origin(annotation) in (tuple, list)


def allowed(field: FieldInfo) -> str:
    """Describe the accepted values of a key."""
    if names := kinds(field):
        return f"Allowed: {', '.join(names)}"
    return f"Allowed: {_described(field.annotation, field.metadata)}"


def _described(annotation: Any, limits: Any = ()) -> str:
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        limits = []
        for limit in args[1:]:
            limits += getattr(limit, "metadata", [limit])
        return _described(args[0], limits)
    if origin is Literal:
        names = ", ".join(map(str, args))
        return f"one of {names}" if len(args) > 1 else names
    if origin in (Union, types.UnionType):
        return " or ".join(_described(arg) for arg in args)
    if origin is tuple and args[-1] is not Ellipsis:
        words = [_described(arg) for arg in args]
        equal = len({*words}) == 1
        each = f", each {words[0]}" if equal else f": {', '.join(words)}"
        return f"a list of {len(args)} values{each}"
    if origin in (tuple, list, set, frozenset, Sequence):
        return f"a list of {_described(args[0])}"
    if origin is dict or is_dataclass(annotation):
        value = _described(args[1]) if args and args[1] is not Any else "value"
        return f"a section of key: {value}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(str(member.value) for member in annotation)}"
    if annotation is Any:
        return "text, a list or a section"
    bounds = [
        f"{sign} {getattr(limit, name):g}"
        for limit in limits
        for name, sign in _LIMITS.items()
        if hasattr(limit, name)
    ]
    name = _NAMES.get(annotation) or getattr(annotation, "__name__", str(annotation))
    return f"{name} {' and '.join(bounds)}".rstrip()
