"""Describe keys of the configuration: accepted values and meaning, from the schema."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from kd.config.renamed import renamed_key
from kd.config.schema import Config
from kd.config.section import PartSection, options_by_kind
from kd.config.words import allowed, is_list, keys_of, section_of
from kd.core.errors import ConfigError, PartNotFound, did_you_mean
from kd.core.keys import declaration, fields_of
from kd.parts import registry


def explain(prefix: str = "") -> list[tuple[str, str, str, str]]:
    """List (key, allowed, default, meaning) of every key below a dotted prefix.

    The prefix may also name a module outside kd, whose keys are listed then.
    """
    rows = list(_explain(Config, ""))
    section = prefix.partition(".")[0].removesuffix("[]")
    if "." in prefix and section not in fields_of(Config):  # a part from outside
        try:
            return list(_explain(registry.options_type("losses", prefix, prefix), ""))
        except PartNotFound as error:
            near = did_you_mean(prefix.lower(), [row[0] for row in rows])
            if near:
                raise ConfigError(prefix, "no such key", "", near) from error
            raise
    if not prefix:
        return rows
    prefix = renamed_key(prefix)
    below = (f"{prefix}.", f"{prefix}[")
    return [row for row in rows if row[0] == prefix or row[0].startswith(below)]


def _explain(cls: type, config_path: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in keys_of(cls).items():
        key = f"{config_path}.{name}".lstrip(".")
        section = section_of(field.annotation)
        if section and is_list(field.annotation):
            yield from _explain(section, key + "[]")
        elif section is field.annotation and section:
            yield from _explain(section, key)
        else:
            yield key, allowed(field), _default(field), meaning_of(field)
            if section:
                yield from _explain(section, key)
        for kind, options in options_by_kind(field):
            for *row, meaning in _explain(options, config_path):
                yield *row, f"[kind: {kind}] {meaning}"  # type: ignore[misc]


def meaning_of(field: FieldInfo) -> str:
    """Return a key's description on one line."""
    return " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return json.dumps(to_jsonable_python(value, fallback=repr))  # which is YAML


def explain_part(name: str) -> list[tuple[str, str]]:
    """List the section and the first sentence of each part of a name, such as `kl`."""
    summaries: list[tuple[str, str]] = []
    for section, field in fields_of(Config).items():
        kind = fields_of(section_of(field.annotation)).get("kind")
        if kind and name in dict(options_by_kind(kind)):
            module = registry.find(declaration(kind)["parts"], name, section)
            brackets = "[]" * is_list(field.annotation)
            summaries.append((section + brackets, registry.summary(module)))
    return summaries


def kinds_of(values: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the kinds that plain values name, by section (`data`, `losses[]`)."""
    kinds: dict[str, set[str]] = {}
    for name, field in fields_of(Config).items():
        section = section_of(field.annotation)
        several = is_list(field.annotation)
        if not issubclass(section, PartSection):
            continue
        value = values.get(name) or {}
        also = value.get("also") if isinstance(value, Mapping) else None
        items = value if several else [value, *(also or ())]
        default = fields_of(section)["kind"].default
        words = [
            item.get("kind", default) for item in items if isinstance(item, Mapping)
        ]
        kinds[name + "[]" * several] = {
            section.present(word) for word in words if isinstance(word, str)
        }
    return kinds
