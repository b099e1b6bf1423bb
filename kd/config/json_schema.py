"""The JSON Schema of a configuration, for editors that complete and check YAML while it
is typed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from kd.config.explain import kinds_of
from kd.config.renamed import KEYS, KINDS
from kd.config.schema import Config
from kd.config.section import PartSection, kinds
from kd.config.words import is_list, keys_of, section_of
from kd.core.keys import RULES, declaration, fields_of
from kd.parts import registry

Schema = dict[str, Any]
DRAFT = (  # the newest that the YAML extension of VS Code reads in full
    "http://json-schema.org/draft-07/schema#"
)
REFERENCE: Schema = {
    "type": "string",
    "pattern": r"\$\{",
}  # `${oc.env:NAME}` in place of any value
NUMBER: Schema = {
    "type": "string",
    "pattern": r"\$\{|^[-+]?[\d_.]+([eE][-+]?\d+)?$",
}  # a number may be quoted
TEXT: Schema = {
    "type": ["string", "integer", "null"]
}  # whole numbers become text, and `key:` is empty
FILE = "kd.schema.json"
"""Name of the file beside a configuration."""
EDITOR_LINE = f"# yaml-language-server: $schema={FILE}"
"""First line of a configuration, by which an editor finds the schema."""


def json_schema(values: Mapping[str, Any] | None = None) -> Schema:
    """Return the schema of a configuration, with the parts from outside kd that the
    values of one name.
    """
    made = _Definitions(kinds_of(values or {}))
    sections = {
        name: made.key(name, field) for name, field in fields_of(Config).items()
    }
    dotted = {
        f"^({'|'.join(sections)})\\.": {}
    }  # `optimizer.lr: 0.1` at the top of a file
    root = {
        "type": "object",
        "properties": sections,
        "patternProperties": dotted,
        "additionalProperties": False,
    }
    return {
        "$schema": DRAFT,
        "title": "A configuration of kd",
        **root,
        "definitions": made.definitions,
    }


class _Definitions:
    """Writes each section once, in `definitions`; `kinds`: the kinds that a
    configuration uses, by section.
    """

    def __init__(self, kinds: dict[str, set[str]]) -> None:
        self.kinds, self.definitions = kinds, dict[str, Schema]()

    def key(self, name: str, field: FieldInfo) -> Schema:
        """Return the schema of a key's value."""
        section, meaning = (
            section_of(field.annotation),
            " ".join((field.description or "").split()),
        )
        described = {"description": meaning} if meaning else {}
        if section is None:
            default = {}
            if not field.is_required():
                value = field.get_default(call_default_factory=True)
                default = {
                    "default": to_jsonable_python(
                        value, fallback=repr, inf_nan_mode="strings"
                    )
                }
            return {**_value(field), **default, **described}
        several = is_list(field.annotation)
        value = {
            "$ref": f"#/definitions/{self.section(name + '[]' * several, section)}"
        }
        if several:
            return {"type": "array", "items": value, **described}
        return {
            "anyOf": [value, {"type": "null"}],
            **described,
        }  # `run:` alone has its defaults

    def section(self, name: str, cls: type) -> str:
        """Define a section and return its name; one that names a part has an
        alternative for each kind.
        """
        if cls.__name__ not in self.definitions:
            self.definitions[cls.__name__] = {}  # its place
            is_part = issubclass(cls, PartSection)
            made = (
                self.alternatives(name, cls)
                if is_part
                else self.keys(name, keys_of(cls))
            )
            self.definitions[cls.__name__] = {"description": _summary(cls), **made}
        return cls.__name__

    def alternatives(self, name: str, cls: type[PartSection]) -> Schema:
        """Return the schema of a section for each kind that it may name."""
        kind = fields_of(cls)["kind"]
        outside = sorted(one for one in self.kinds.get(name, ()) if "." in one)
        known = [*kinds(kind), *outside]
        found = [self.of_kind(name, cls, one) for one in known]
        old = [*KINDS.get(name.removesuffix("[]"), {})]
        names: Schema = {
            "anyOf": [{"enum": [*known, *old]}, {"type": "string", "pattern": r"\."}]
        }
        others: Schema = {
            "pattern": r"\.",
            **({"not": {"enum": outside}} if outside else {}),
        }  # of a laboratory: any keys
        lab: Schema = {
            "type": "object",
            "properties": {"kind": others},
            "required": ["kind"],
        }
        return {"properties": {"kind": names}, "oneOf": [*found, lab]}

    def of_kind(self, name: str, cls: type[PartSection], kind: str) -> Schema:
        """Return the schema of a section whose kind is given."""
        found = self.keys(name, keys_of(cls, {"kind": kind}))
        old = [
            word
            for word, new in KINDS.get(name.removesuffix("[]"), {}).items()
            if new == kind
        ]
        field = fields_of(cls)["kind"]
        meaning = found["properties"]["kind"].get("description", "")
        if kind != "auto":
            about = registry.summary(
                registry.find(declaration(field)["parts"], kind, name)
            )
            found["description"], meaning = about, f"{meaning} {kind}: {about}"
        found["properties"]["kind"] = {"enum": [kind, *old], "description": meaning}
        if kind != field.default:
            found["required"] = sorted({*found.get("required", []), "kind"})
        return found

    def keys(self, name: str, fields: dict[str, FieldInfo]) -> Schema:
        """Return the schema of keys, with their old names."""
        properties = {key: self.key(key, field) for key, field in fields.items()}
        for old, new in KEYS.get(name, {}).items():
            properties[old] = {
                **properties[new],
                "deprecated": True,
                "description": f"The old name of {new}.",
            }
        required = [key for key, field in fields.items() if field.is_required()]
        named = {"required": required} if required else {}
        return {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            **named,
        }


def _summary(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split())


def _value(field: FieldInfo) -> Schema:
    """Return the schema of a plain value, or of a reference in its place."""
    if field.annotation is str:
        return dict(TEXT)
    annotation: Any = (
        Annotated[(field.annotation, *field.metadata)]
        if field.metadata
        else field.annotation
    )
    try:
        plain = TypeAdapter(annotation, config=RULES).json_schema()
    except (
        PydanticInvalidForJsonSchema
    ):  # a type of a part from outside, which YAML cannot hold
        return {}
    if "$defs" in plain:  # its references would lead nowhere here
        return {}
    if pair := plain.pop("prefixItems", None):  # a word of later drafts
        plain["items"] = {"anyOf": pair}
    if not plain or plain.get("type") == "object":
        return plain
    numeric = {int, float} & {field.annotation, *get_args(field.annotation)}
    return {"anyOf": [*plain.get("anyOf", [plain]), NUMBER if numeric else REFERENCE]}
