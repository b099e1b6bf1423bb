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
    """Return the parts that a key `kind` may name, after a word such as `auto`; [] for
    another key.
    """
    if "parts" not in declaration(field):
        return []
    names = declaration(field)["only"] or registry.names(declaration(field)["parts"])
    word = [] if field.is_required() or field.default in names else [field.default]
    return [*word, *names]


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
        """Return the `Options` of the kind that a section's values name; KdError: there
        is no such part.
        """
        field = fields_of(cls)["kind"]
        known = kinds(field)
        kind = values.get("kind", None if field.is_required() else field.default)
        if not isinstance(kind, str) or not kind:
            raise ConfigError(
                "kind", f"is {kind!r}" if kind else "is missing", ", ".join(known)
            )
        if "." not in kind and kind not in known:
            raise PartNotFound(
                "kind", f"is {kind!r}", ", ".join(known), did_you_mean(kind, known)
            )
        options = registry.options_type(
            declaration(field)["parts"], cls.present(kind), "kind"
        )
        if taken := sorted(fields_of(options).keys() & fields_of(cls).keys()):
            wrong = (
                f"is {kind!r}, whose Options has the keys of every section of this"
                f" sort: {', '.join(taken)}"
            )
            raise ConfigError("kind", wrong, "Keys of its own", "Rename them there")
        return options

    @model_validator(mode="wrap")
    @classmethod
    def _with_options(cls, given: Any, check: Callable[[Any], Any]) -> Any:
        """Check the part's keys as its `Options`, and the others as this section;
        report the errors of both.
        """
        values = (given.kwargs or {}) if isinstance(given, ArgsKwargs) else given
        if not isinstance(values, Mapping) or is_dataclass(values.get("options")):
            return check(given)
        own, errors = fields_of(cls).keys() - {"options"}, list[InitErrorDetails]()
        rest, options = (
            {key: value for key, value in values.items() if key in own},
            None,
        )
        try:
            made = cls.options_class(values)
            foreign = {key: value for key, value in values.items() if key not in own}
            known = fields_of(made)
            if (
                "options" in foreign.keys() - known.keys()
            ):  # the name of a field here, of no key
                errors.append(
                    InitErrorDetails(
                        type="unexpected_keyword_argument",
                        loc=("options",),
                        input=foreign,
                    )
                )
            rest |= {key: value for key, value in foreign.items() if key not in known}
            options = build_checked(
                made, {key: value for key, value in foreign.items() if key in known}
            )
        except ValidationError as error:
            errors += details(error)
        except KdError as error:
            errors.append(
                InitErrorDetails(
                    type="value_error",
                    loc=(),
                    input=values,
                    ctx={"error": Refused(error)},
                )
            )
        except (ValueError, AssertionError) as error:  # of a plain dataclass
            errors.append(
                InitErrorDetails(
                    type="value_error", loc=(), input=values, ctx={"error": error}
                )
            )
        try:
            section = check(rest | {"options": options})
        except ValidationError as error:
            errors += details(error)
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return section
