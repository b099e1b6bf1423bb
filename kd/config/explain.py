"""Say what a key accepts and means: read from the schema, its types, ranges and texts."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kd.config.schema import Config
from kd.core.options import field_docs
from kd.parts import registry


def explain(prefix: str = "") -> list[tuple[str, str, str, str]]:
    """List (key, allowed, default, meaning) of every key, the parts' own too, below a dotted prefix; or of a module."""
    if "." in prefix and prefix.partition(".")[0].removesuffix("[]") not in types_of(Config):  # a part from outside
        return list(_explain(registry.options_type("losses", prefix, prefix), ""))
    rows = list(_explain(Config, ""))
    return [row for row in rows if not prefix or row[0] == prefix or row[0].startswith((prefix + ".", prefix + "["))]


def _explain(cls: type, where: str) -> Iterator[tuple[str, str, str, str]]:
    docs, hints = field_docs(cls), types_of(cls)
    for f in dataclasses.fields(cls):
        if f.name == "options":
            continue
        key, annotation = f"{where}.{f.name}" if where else f.name, hints[f.name]
        if get_origin(annotation) is tuple and dataclasses.is_dataclass(get_args(annotation)[0]):
            yield from _explain(get_args(annotation)[0], key + "[]")  # type: ignore[arg-type]
        elif dataclasses.is_dataclass(annotation):
            yield from _explain(annotation, key)  # type: ignore[arg-type]
        else:
            value = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            default = "required" if value is dataclasses.MISSING else shown
            yield key, allows(cls, f.name), default, docs.get(f.name, "")
        folder = f.metadata.get("parts", "")
        for name in (f.metadata["only"] or registry.names(folder)) if folder else ():
            for *row, meaning in _explain(registry.options_type(folder, name, where), where):
                yield *row, f"[kind: {name}] {meaning}"  # type: ignore[misc]


def types_of(cls: type) -> dict[str, Any]:
    """Return the fields a YAML may set, with their types."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name != "options"}


def allows(cls: type, key: str) -> str:
    """Describe in words what a key accepts."""
    field = next(f for f in dataclasses.fields(cls) if f.name == key)
    if "parts" in field.metadata:
        return f"Allowed: {', '.join(field.metadata['only'] or registry.names(field.metadata['parts']))}"
    text = _describe(types_of(cls)[key])
    low, high, above = (field.metadata.get(name) for name in ("low", "high", "above"))
    limits = [f">= {low:g}"] if low is not None else [f"> {above:g}"] if above is not None else []
    limits += [f"<= {high:g}"] if high is not None else []
    return f"Allowed: {text}{' ' if limits else ''}{' and '.join(limits)}"


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def _describe(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        if args == (int, str):
            return "auto or a whole number"
        return " or ".join(_describe(arg) for arg in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)} values, each {_describe(args[0])}"
    if origin in (tuple, list):
        return f"a list of {_describe(args[0])}"
    if origin is dict or annotation is Any:
        return "a section of key: value" if origin else "text, a list or a section"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))
