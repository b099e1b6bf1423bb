"""A section that names a part: the part's own keys stand beside `kind`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs, InitErrorDetails

from kd.core.errors import ConfigError, KdError, PartNotFound, did_you_mean
from kd.core.keys import (
    Keys,
    Refused,
    build_checked,
    declaration,
    details,
    fields_of,
    keys,
)
from kd.parts import registry


def kinds(field: FieldInfo) -> list[str]:
    """Return what a key `kind` may name, a word such as `auto` first; else []."""
    if "parts" not in declaration(field):
        return []
    names = declaration(field)["only"] or registry.names(declaration(field)["parts"])
    if field.is_required() or field.default in names:
        return [*names]
    return [field.default, *names]


def options_by_kind(field: FieldInfo) -> Iterator[tuple[str, type]]:
    """Yield each part that a key `kind` may name, with the class of its own keys."""
    for kind in kinds(field):
        if kind != "auto":  # a word, which stands for a part
            yield kind, registry.options_type(declaration(field)["parts"], kind, "kind")


@keys
class PartSection(Keys):
    """A `kind`, the keys common to all kinds, and in `options` the checked keys of this
    kind.
    """

    kind: str = ""
    options: Any = None

    @classmethod
    def present(cls, kind: str) -> str:
        """Return the kind that stands for a word such as `auto`."""
        return kind

    @classmethod
    def options_class(cls, values: Mapping[str, Any]) -> type:
        """Return the `Options` of the kind that a section's values name.

        Raises:
            KdError: There is no such part.
        """
        field = fields_of(cls)["kind"]
        allowed = kinds(field)
        kind = values.get("kind", None if field.is_required() else field.default)
        if not isinstance(kind, str) or not kind:
            wrong = f"is {kind!r}" if kind else "is missing"
            raise ConfigError("kind", wrong, ", ".join(allowed))
        if "." not in kind and kind not in allowed:
            near = did_you_mean(kind, allowed)
            raise PartNotFound("kind", f"is {kind!r}", ", ".join(allowed), near)
        options = registry.options_type(
            declaration(field)["parts"], cls.present(kind), "kind"
        )
        if shared := sorted(fields_of(options).keys() & fields_of(cls).keys()):
            wrong = (
                f"is {kind!r}, whose Options has the keys of every section of this"
                f" sort: {', '.join(shared)}"
            )
            raise ConfigError("kind", wrong, "Keys of its own", "Rename them there")
        return options

    @model_validator(mode="wrap")
    @classmethod
    def _with_options(cls, raw: Any, check: Callable[[Any], Any]) -> Any:
        """Check the part's keys as its `Options`, and the others as this section."""
        values = (raw.kwargs or {}) if isinstance(raw, ArgsKwargs) else raw
        if not isinstance(values, Mapping) or is_dataclass(values.get("options")):
            return check(raw)
        names = fields_of(cls).keys() - {"options"}
        section_values = {key: values[key] for key in values if key in names}
        options = None
        errors: list[InitErrorDetails] = []
        try:
            options_class = cls.options_class(values)
            option_names = fields_of(options_class)
            foreign = {key: values[key] for key in values if key not in names}
            # the name of a field here, of no key
            if "options" in foreign and "options" not in option_names:
                errors.append(
                    InitErrorDetails(
                        type="unexpected_keyword_argument",
                        loc=("options",),
                        input=foreign,
                    )
                )
            option_values = {}
            for key, value in foreign.items():
                if key in option_names:
                    option_values[key] = value
                else:
                    section_values[key] = value
            options = build_checked(options_class, option_values)
        except ValidationError as error:
            errors += details(error)
        except (KdError, ValueError, AssertionError) as error:
            # a plain dataclass raises the last two
            cause = Refused(error) if isinstance(error, KdError) else error
            errors.append(
                InitErrorDetails(
                    type="value_error", loc=(), input=values, ctx={"error": cause}
                )
            )
        try:
            section = check(section_values | {"options": options})
        except ValidationError as error:
            errors += details(error)
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return section
