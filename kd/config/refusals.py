"""Say Pydantic's errors as kd does.

`<config path>: <what is wrong>. <what is allowed>.`
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kd.config.section import options_by_kind
from kd.config.words import allowed, is_list, keys_of, section_of
from kd.core.errors import ConfigError, KdError, did_you_mean
from kd.core.keys import Refused, fields_of


class Place(NamedTuple):
    """A key of a configuration, and what stands there."""

    config_path: str  # "losses[0].weight"
    owner: type  # the section's class
    keys: dict[str, FieldInfo]  # the keys of that section
    field: FieldInfo | None  # None: no such key, or a section of a list
    value: Any


def kd_errors(error: ValidationError, cls: type, raw: Any) -> list[KdError]:
    """Return an error for each wrong key in the values `raw` of a class of keys."""
    errors: dict[tuple[str, str], KdError] = {}
    for detail in error.errors(include_url=False):
        place = _place(cls, raw, detail["loc"])
        cause = detail.get("ctx", {}).get("error")
        kd_error = _kd_error(cls, place, detail["type"], cause)
        # a union has an error for each of its types
        errors.setdefault((kd_error.config_path, kd_error.wrong), kd_error)
    return list(errors.values())


def with_new_errors(errors: Sequence[KdError], new: Sequence[KdError]) -> list[KdError]:
    """Return all errors, without new ones about a key that has an error already."""
    paths = {error.config_path for error in errors}
    return [*errors, *(error for error in new if error.config_path not in paths)]


def _place(cls: type, raw: Any, steps: Sequence[int | str]) -> Place:
    """Follow the steps from the root, at most to a plain value."""
    place = Place("", cls, keys_of(cls, raw), None, raw)
    for step in steps:
        if isinstance(step, int):
            config_path = f"{place.config_path}[{step}]"
            value = place.value[step]
            keys = keys_of(place.owner, value)
            place = Place(config_path, place.owner, keys, None, value)
            continue
        config_path = f"{place.config_path}.{step}".lstrip(".")
        value = place.value.get(step) if isinstance(place.value, Mapping) else None
        field = place.keys.get(step)
        section = section_of(field.annotation) if field else None
        if section is None:
            return Place(config_path, place.owner, place.keys, field, value)
        place = Place(config_path, section, keys_of(section, value), field, value)
    return place


def _kd_error(root: type, place: Place, kind: str, cause: Any) -> KdError:
    config_path = place.config_path
    value = place.value
    field = place.field
    if isinstance(cause, Refused):
        error = cause.error
        path = f"{config_path}.{error.config_path}".strip(".")
        return type(error)(path, error.wrong, error.allowed, error.remedy)
    if kind in ("unexpected_keyword_argument", "invalid_key"):
        return ConfigError(
            config_path,
            "no such key",
            f"Allowed: {', '.join(sorted(place.keys))}",
            _remedy(root, place),
        )
    if kind == "missing" and field and value is None:  # else an item of it is missing
        return ConfigError(config_path, "is missing", allowed(field))
    if field is not None and is_list(field.annotation) and section_of(field.annotation):
        return ConfigError(
            config_path,
            f"is {value!r}",
            "A list of sections is expected",
            f"Start each with '- ', or write {config_path}=[{{...}}]",
        )
    if field is None or section_of(field.annotation):
        if cause is not None:
            return _rule(place, str(cause))
        return ConfigError(
            config_path,
            f"is {value!r}",
            f"A section with keys is expected: {', '.join(place.keys)}",
        )
    if field.annotation is str and isinstance(value, (bool, float)):
        kind = "a boolean" if isinstance(value, bool) else "a number"
        wrong = f"is {value!r}, because YAML reads it as {kind} without quotes"
        return ConfigError(
            config_path, wrong, "Text", f"Quote it; in a shell '{config_path}=\"...\"'"
        )
    if isinstance(value, str) and "\0" in value:
        return ConfigError(
            config_path, f"is {value!r}, with a zero byte", "Text without one"
        )
    return ConfigError(config_path, f"is {value!r}", allowed(field))


def _rule(place: Place, text: str) -> KdError:
    """Return a part's own rule; "temperature is 4, ..." is about that key."""
    text = " ".join(text.split()) or "breaks a rule of its part"
    key, _, wrong = text.partition(" ")
    if key in place.keys and wrong.startswith(("is ", "are ", "needs ", "must ")):
        return ConfigError(f"{place.config_path}.{key}", wrong)
    return ConfigError(place.config_path, text)


def _remedy(root: type, place: Place) -> str:
    """Name the kinds that have the key, or the key that is meant."""
    # below this section, a similar one, or elsewhere
    section, _, key = place.config_path.rpartition(".")
    if kinds := [kind for kind, keys in _kinds(place.keys) if key in keys]:
        return f"Kinds with this key: {', '.join(kinds)}"
    if place.config_path in _paths(root, ""):  # `every.log` in the section `run`
        return "Dots join keys at the top of a file alone"
    for name, field in place.keys.items():
        if key in get_args(field.annotation):
            return f"Did you mean '{name}: {key}'?"
    exact = [path for path in _paths(root, "") if path.rpartition(".")[2] == key]
    below = [path for path in exact if section and path.startswith(f"{section}.")]
    if not below and (similar := did_you_mean(key.lower(), place.keys)):
        return similar
    nearest = min(below or exact, key=lambda path: path.count("."), default="")
    return f"Did you mean '{nearest}'?" if nearest else ""


def _paths(cls: type, prefix: str) -> Iterator[str]:
    """Yield the paths of all keys below a class of keys, those of each kind too."""
    keys = keys_of(cls)
    names = dict.fromkeys(keys)
    for _, fields in _kinds(keys):
        names |= dict.fromkeys(fields)
    for name in names:
        yield f"{prefix}{name}"
        if name in keys and (section := section_of(keys[name].annotation)):
            items = "[]" if is_list(keys[name].annotation) else ""
            yield from _paths(section, f"{prefix}{name}{items}.")


def _kinds(
    keys: Mapping[str, FieldInfo],
) -> Iterator[tuple[str, Mapping[str, FieldInfo]]]:
    """Yield the kinds of a section with the keys of each."""
    if "kind" in keys:
        for kind, options in options_by_kind(keys["kind"]):
            yield kind, fields_of(options)
