"""A configuration's keys have a base class, checked by Pydantic.

It is the base of the sections and of each part's `Options`.

A field is a key: its type and `Field(ge=...)` say what is allowed, the string under it
says what it means.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    ConfigDict,
    Field,
    PydanticUserError,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticUndefined
from typing_extensions import dataclass_transform

from kd.core.errors import ConfigError, KdError, first_sentence
from kd.core.options import field_docs
from kd.core.references import Referenced

T = TypeVar("T")
Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
ProperFraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
RULES = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    coerce_numbers_to_str=True,
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(Field,)
)
def keys(cls: type[T]) -> type[T]:
    """Make a class of keys: a frozen dataclass that checks its values.

    A wrong value raises pydantic.ValidationError, a ValueError.
    """
    checking: Any = dataclass(cls, frozen=True, kw_only=True, config=RULES)
    inherited = {
        name: field
        for base in reversed(checking.__mro__[1:-1])
        for name, field in base.__pydantic_fields__.items()
    }
    for name, field in checking.__pydantic_fields__.items():
        if name in inherited:  # Pydantic reads the strings of a class itself alone
            field.description = field.description or inherited[name].description
    return checking


@keys
class Keys:
    """The base of each class of keys."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_written(
        cls, value: Any, check: Callable[[Any], Any], info: ValidationInfo
    ) -> Any:
        """Check a value as YAML read it, and keep the references of its texts."""
        annotation = fields_of(cls)[str(info.field_name)].annotation
        if value is None and annotation is str:  # `key:`
            return ""
        if value is None and dataclasses.is_dataclass(annotation):
            value = {}
        if isinstance(value, float) and annotation is str:  # 1.10 would become 1.1
            raise ValueError("a number")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("a zero byte")
        # the environment holds texts
        if isinstance(value, Referenced) and annotation is bool:
            value = {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, bool) and annotation not in (bool, Any):
            value = _word(annotation, value)
        if annotation is bool and not isinstance(value, bool):
            raise ValueError("not true or false")
        result = check(value)
        if get_origin(annotation) is Literal:
            return result
        return keep_references(value, result)


def _word(annotation: Any, value: bool) -> Any:
    """Return the word that YAML read as a boolean, a bare `off` or `on`.

    ValueError: no such word is allowed.
    """
    word = "on" if value else "off"
    if word not in get_args(annotation):
        raise ValueError("a boolean")
    return word


def keep_references(value: Any, checked: Any) -> Any:
    """Return the checked value with the references of its texts.

    Numbers and enumerated words need no reference.
    """
    if isinstance(value, Mapping) and isinstance(checked, dict):
        return {
            key: keep_references(value.get(key), item) for key, item in checked.items()
        }
    if isinstance(value, (list, tuple)) and isinstance(checked, (list, tuple)):
        return type(checked)(
            keep_references(*pair) for pair in zip(value, checked, strict=True)
        )
    if isinstance(value, Referenced) and isinstance(checked, str):
        return Referenced(checked, value.reference)
    return checked


def part_kind(
    folder: str, default: Any = PydanticUndefined, only: tuple[str, ...] = ()
) -> Any:
    """Declare the `kind` of a section, which names a part of a folder.

    Args:
        folder: the folder of the parts.
        default: the default kind.
        only: the allowed names; empty: all.
    """
    return Field(
        default=default, json_schema_extra={"parts": folder, "only": list(only)}
    )


def file_key(
    default: Any = PydanticUndefined, within: str = "", or_name: bool = False
) -> Any:
    """Declare a key that names input files, so that a launcher can upload them.

    See `kd.core.facts.FileKey`.

    `within`: the key of the folder that relative paths start from. `or_name`: it may
    also be a name, as a model's.
    """
    return Field(
        default=default, json_schema_extra={"files": within, "or_name": or_name}
    )


def fields_of(cls: type) -> dict[str, FieldInfo]:
    """Return the keys of a class by name, with types, ranges and meanings."""
    return class_of_keys(cls).__pydantic_fields__  # type: ignore[attr-defined]


def declaration(field: FieldInfo) -> Mapping[str, Any]:
    """Return what `part_kind` or `file_key` declared."""
    declared = field.json_schema_extra
    return declared if isinstance(declared, Mapping) else {}


@cache
def class_of_keys(cls: type) -> type:
    """Return a class of keys as it is, or make one of a plain dataclass.

    A part from outside may have a plain dataclass.
    """
    if "__pydantic_fields__" in cls.__dict__:
        return cls
    docs = field_docs(cls)
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise _unreadable_types(cls, error) from error
    members: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if isinstance(field.default, FieldInfo):  # inherited from a class of keys
            members[field.name] = field.default
            continue
        default: dict[str, Any] = {}
        for name in ("default", "default_factory"):
            value = getattr(field, name)
            if value is not dataclasses.MISSING:
                default[name] = value
        members[field.name] = Field(description=docs.get(field.name), **default)
    hints = {name: hints[name] for name in members}  # without ClassVar and InitVar
    members |= {"__annotations__": hints, "__module__": cls.__module__}
    try:
        return keys(type(cls.__name__, (Keys,), members))
    except PydanticUserError as error:
        raise _unreadable_types(cls, error) from error


def _unreadable_types(cls: type, error: Exception) -> KdError:
    wrong = (
        f"the types of {cls.__module__}.{cls.__qualname__} cannot be read"
        f" ({first_sentence(error)})"
    )
    return ConfigError(
        "kind",
        wrong,
        "Types of Python and Pydantic, imported where the class is defined",
    )


def build_checked(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build a class of keys, or a plain dataclass, from values.

    pydantic.ValidationError: they are wrong.
    """
    instance = class_of_keys(cls)(**values)
    if isinstance(instance, cls):
        return instance
    return cls(**{key: getattr(instance, key) for key in fields_of(cls)})


class Refused(ValueError):
    """A value breaks a rule that Pydantic does not know.

    `error.config_path` is relative to the section.
    """

    def __init__(self, error: KdError) -> None:
        super().__init__(str(error))
        self.error = error


def details(error: ValidationError) -> list[InitErrorDetails]:
    """Return the errors of a section's part, to be raised among the section's own."""
    return [
        InitErrorDetails(
            type=_error_type(fault["type"]),
            loc=fault["loc"],
            input=fault["input"],
            ctx=fault.get("ctx", {}),
        )
        for fault in error.errors(include_url=False)
    ]


def _error_type(kind: str) -> Any:
    """Return the type of an error that kd tells apart, or one for wrong values.

    Some types cannot be raised.
    """
    if kind in (
        "missing",
        "unexpected_keyword_argument",
        "value_error",
        "assertion_error",
    ):
        return kind
    return PydanticCustomError("wrong_value", "a wrong value")
