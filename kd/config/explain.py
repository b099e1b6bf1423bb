"""Describe keys of the configuration: accepted values and meaning, from the schema."""

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from kd.config.schema import Config
from kd.config.words import allowed, is_list, keys_of, section_of
from kd.core.keys import extra, fields_of
from kd.parts import registry


def explain(prefix: str = "") -> list[tuple[str, str, str, str]]:
    """List (key, allowed, default, meaning) of every key below a dotted prefix, or of a module outside kd."""
    if "." in prefix and prefix.partition(".")[0].removesuffix("[]") not in fields_of(Config):  # a part from outside
        return list(_explain(registry.options_type("losses", prefix, prefix), ""))
    rows = list(_explain(Config, ""))
    return [row for row in rows if not prefix or row[0] == prefix or row[0].startswith((prefix + ".", prefix + "["))]


def _explain(cls: type, where: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in keys_of(cls).items():
        key = f"{where}.{name}".lstrip(".")
        section = section_of(field.annotation)
        if section and is_list(field.annotation):
            yield from _explain(section, key + "[]")
        elif section is field.annotation and section:
            yield from _explain(section, key)
        else:
            yield key, allowed(field), _default(field), " ".join((field.description or "").split())
        folder = extra(field).get("parts", "")
        for kind in (extra(field)["only"] or registry.names(folder)) if folder else ():
            for *row, meaning in _explain(registry.options_type(folder, kind, where), where):
                yield *row, f"[kind: {kind}] {meaning}"  # type: ignore[misc]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return str(value).lower() if isinstance(value, bool) else repr(value)


def kinds_of(config: Config) -> dict[str, set[str]]:
    """Return the kinds of parts that a configuration uses, by section: `data`, `losses[]`."""
    used: dict[str, set[str]] = {}
    for name in fields_of(Config):
        value = getattr(config, name)
        parts = value if isinstance(value, tuple) else (value, *getattr(value, "also", ()))
        if kinds := {part.kind for part in parts if hasattr(part, "kind")}:
            used[name + "[]" * isinstance(value, tuple)] = kinds
    return used
