"""Describe keys of the configuration: accepted values and meaning, from the schema."""

import dataclasses
from collections.abc import Iterator
from typing import get_args, get_origin

from kd.config.schema import Config
from kd.config.tuning import allows, section_of, types_of
from kd.core.options import field_docs
from kd.parts import registry


def explain(prefix: str = "") -> list[tuple[str, str, str, str]]:
    """List (key, allowed, default, meaning) of every key below a dotted prefix, or of a module outside kd."""
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
        elif section_of(annotation) is annotation:
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


def kinds_of(config: Config) -> dict[str, set[str]]:
    """Return the kinds of parts that a configuration uses, by section: `data`, `losses[]`."""
    used: dict[str, set[str]] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        parts = value if isinstance(value, tuple) else (value, *getattr(value, "also", ()))
        if kinds := {part.kind for part in parts if hasattr(part, "kind")}:
            used[f.name + "[]" * isinstance(value, tuple)] = kinds
    return used
