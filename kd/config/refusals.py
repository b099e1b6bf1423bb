"""Pydantic's errors as kd says them: `<config path>: <what is wrong>. <what is allowed>.`"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kd.config.words import allowed, is_list, keys_of, section_of
from kd.core.errors import ConfigError, KdError, did_you_mean
from kd.core.keys import Refused, extra, fields_of
from kd.parts import registry


class Place(NamedTuple):
    """A key of a configuration, and what stands there."""

    where: str  # "losses[0].weight"
    owner: type  # the section's class
    known: dict[str, FieldInfo]  # the keys of that section
    field: FieldInfo | None  # None: no such key, or a section of a list
    value: Any


def refusals(error: ValidationError, cls: type, raw: Any) -> list[KdError]:
    """Return an error for each key that is wrong in the values `raw` of a class of keys."""
    found: dict[tuple[str, str], KdError] = {}
    for one in error.errors(include_url=False):
        told = _told(cls, _place(cls, raw, one["loc"]), one["type"], one.get("ctx", {}).get("error"))
        found.setdefault((told.where, told.wrong), told)  # a union tells once for each of its types
    return list(found.values())


def _place(cls: type, raw: Any, steps: Sequence[int | str]) -> Place:
    """Follow the steps from the root; below a plain value, the key as a whole is meant."""
    place = Place("", cls, keys_of(cls, raw), None, raw)
    for step in steps:
        if isinstance(step, int):
            value = place.value[step]
            place = Place(f"{place.where}[{step}]", place.owner, keys_of(place.owner, value), None, value)
            continue
        field, value = place.known.get(step), place.value.get(step) if isinstance(place.value, Mapping) else None
        where = f"{place.where}.{step}".lstrip(".")
        section = section_of(field.annotation) if field else None
        if section is None:
            return Place(where, place.owner, place.known, field, value)
        place = Place(where, section, keys_of(section, value), field, value)
    return place


def _told(root: type, place: Place, kind: str, cause: Any) -> KdError:
    where, value, field = place.where, place.value, place.field
    if isinstance(cause, Refused):
        error = cause.error
        path = f"{where}.{error.where}".strip(".")
        return type(error)(path, error.wrong, error.allowed, error.remedy)
    if kind in ("unexpected_keyword_argument", "invalid_key"):
        return ConfigError(where, "no such key", f"Allowed: {', '.join(sorted(place.known))}", _remedy(root, place))
    if kind == "missing" and field:
        return ConfigError(where, "is missing", allowed(field))
    if field is not None and is_list(field.annotation) and section_of(field.annotation):
        return ConfigError(where, f"is {value!r}", "A list of sections is expected", "Start each with '- '")
    if field is None or section_of(field.annotation):
        if cause is not None:
            return ConfigError(where, str(cause))
        return ConfigError(where, f"is {value!r}", f"A section with keys is expected: {', '.join(place.known)}")
    if field.annotation is str and isinstance(value, bool):
        return ConfigError(where, f"is {value!r}: YAML reads a bare no or off as a boolean", "Text", "Quote it")
    return ConfigError(where, f"is {value!r}", allowed(field))


def _remedy(root: type, place: Place) -> str:
    """Return the key that is meant: a similar one, the same one of another section, or that of another kind."""
    key = place.where.rpartition(".")[2]
    if similar := did_you_mean(key, place.known):
        return similar
    sections = {name: section_of(field.annotation) for name, field in fields_of(root).items()}
    if elsewhere := [f"{name}.{key}" for name, cls in sections.items() if cls and key in keys_of(cls)]:
        return f"Did you mean '{elsewhere[0]}'?"
    folder = extra(place.known["kind"]).get("parts", "") if "kind" in place.known else ""
    kinds = registry.names(folder) if folder else []
    having = [kind for kind in kinds if key in fields_of(registry.options_type(folder, kind, key))]
    return f"Kinds with this key: {', '.join(having)}" if having else ""
