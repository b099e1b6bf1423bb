"""Keys and their accepted values in words, for errors, `kd help` and docs/keys.md."""

import types
from collections.abc import Mapping, Sequence
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
    """Return the keys of a section by name; with `values` also those of the part that
    they name.
    """
    found = {name: field for name, field in fields_of(cls).items() if name != "options"}
    if not issubclass(cls, PartSection) or not isinstance(values, Mapping):
        return found
    try:
        return {**found, **fields_of(cls.options_class(values))}
    except KdError:  # reported by itself
        return found


def section_of(annotation: Any) -> Any:
    """Return the class of a key that holds a section, or a list of sections; None for a
    plain value.
    """
    inner = [cls for cls in (annotation, *get_args(annotation)) if is_dataclass(cls)]
    return inner[0] if inner else None


def is_list(annotation: Any) -> bool:
    """Return whether a key holds a list."""
    return get_origin(annotation) in (tuple, list)


def allowed(field: FieldInfo) -> str:
    """Describe the accepted values of a key."""
    if names := kinds(field):
        return f"Allowed: {', '.join(names)}"
    return f"Allowed: {_described(field.annotation, field.metadata)}"


def _described(annotation: Any, limits: Any = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _described(
            args[0],
            [limit for one in args[1:] for limit in getattr(one, "metadata", [one])],
        )
    if origin is Literal:
        return "one of " * (len(args) > 1) + ", ".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_described(arg) for arg in args)
    if origin is tuple and args[-1] is not Ellipsis:
        words = [_described(arg) for arg in args]
        return f"a list of {len(args)} values" + (
            f", each {words[0]}" if len({*words}) == 1 else f": {', '.join(words)}"
        )
    if origin in (tuple, list, set, frozenset, Sequence):
        return f"a list of {_described(args[0])}"
    if origin is dict or is_dataclass(annotation):
        return (
            "a section of key:"
            f" {_described(args[1]) if args and args[1] is not Any else 'value'}"
        )
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(str(member.value) for member in annotation)}"
    if annotation is Any:
        return "text, a list or a section"
    pairs = [
        (sign, getattr(limit, name))
        for limit in limits
        for name, sign in _LIMITS.items()
        if hasattr(limit, name)
    ]
    bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in pairs)
    name = _NAMES.get(annotation) or getattr(annotation, "__name__", str(annotation))
    return f"{name} {bounds}".rstrip()
