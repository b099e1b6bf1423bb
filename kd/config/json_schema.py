"""Write a configuration's JSON Schema, by which editors complete and check YAML."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from kd.config.explain import kinds_of, meaning_of
from kd.config.renamed import KEYS, KINDS
from kd.config.schema import Config
from kd.config.section import PartSection, kinds
from kd.config.words import is_list, keys_of, section_of
from kd.core.keys import RULES, declaration, fields_of
from kd.parts import registry

Schema = dict[str, Any]
# the newest that the YAML extension of VS Code reads in full
DRAFT = "http://json-schema.org/draft-07/schema#"
# `${oc.env:NAME}` in place of any value
REFERENCE: Schema = {"type": "string", "pattern": r"\$\{"}
# a number may be quoted
NUMBER: Schema = {
    "type": "string",
    "pattern": r"\$\{|^[-+]?[\d_.]+([eE][-+]?\d+)?$",
}
# whole numbers become text, and `key:` is empty
TEXT: Schema = {"type": ["string", "integer", "null"]}
FILE = "kd.schema.json"
"""Name of the file beside a configuration."""
EDITOR_LINE = f"# yaml-language-server: $schema={FILE}"
"""First line of a configuration, by which an editor finds the schema."""


def json_schema(values: Mapping[str, Any] | None = None) -> Schema:
    """Return the schema of a configuration, with the parts that `values` name."""
    writer = _SchemaWriter(kinds_of(values or {}))
    sections = {
        name: writer.key(name, field) for name, field in fields_of(Config).items()
    }
    return {
        "$schema": DRAFT,
        "title": "A configuration of kd",
        "type": "object",
        "properties": sections,
        # `optimizer.lr: 0.1` at the top of a file
        "patternProperties": {f"^({'|'.join(sections)})\\.": {}},
        "additionalProperties": False,
        "definitions": writer.definitions,
    }


class _SchemaWriter:
    """Write each section once, in `definitions`."""

    def __init__(self, kinds: dict[str, set[str]]) -> None:
        self.kinds = kinds  # that a configuration uses, by section
        self.definitions: dict[str, Schema] = {}

    def key(self, name: str, field: FieldInfo) -> Schema:
        """Return the schema of a key's value."""
        section = section_of(field.annotation)
        meaning = meaning_of(field)
        description = {"description": meaning} if meaning else {}
        if section is None:
            schema = _value(field)
            if not field.is_required():
                default = field.get_default(call_default_factory=True)
                schema["default"] = to_jsonable_python(
                    default, fallback=repr, inf_nan_mode="strings"
                )
            return {**schema, **description}
        several = is_list(field.annotation)
        reference = {
            "$ref": f"#/definitions/{self.section(name + '[]' * several, section)}"
        }
        if several:
            return {"type": "array", "items": reference, **description}
        # `run:` alone has its defaults
        return {"anyOf": [reference, {"type": "null"}], **description}

    def section(self, name: str, cls: type) -> str:
        """Define a section and return its name."""
        if cls.__name__ not in self.definitions:
            self.definitions[cls.__name__] = {}  # its place
            if issubclass(cls, PartSection):
                schema = self.alternatives(name, cls)
            else:
                schema = self.keys(name, keys_of(cls))
            description = " ".join((cls.__doc__ or "").split())
            self.definitions[cls.__name__] = {"description": description, **schema}
        return cls.__name__

    def alternatives(self, name: str, cls: type[PartSection]) -> Schema:
        """Return the schema of a section for each kind that it may name."""
        field = fields_of(cls)["kind"]
        outside = sorted(kind for kind in self.kinds.get(name, ()) if "." in kind)
        all_kinds = [*kinds(field), *outside]
        schemas = [self.of_kind(name, cls, kind) for kind in all_kinds]
        old_kinds = [*KINDS.get(name.removesuffix("[]"), {})]
        names: Schema = {
            "anyOf": [
                {"enum": [*all_kinds, *old_kinds]},
                {"type": "string", "pattern": r"\."},
            ]
        }
        # of a laboratory: any keys
        lab_kind: Schema = {"pattern": r"\."}
        if outside:
            lab_kind["not"] = {"enum": outside}
        lab: Schema = {
            "type": "object",
            "properties": {"kind": lab_kind},
            "required": ["kind"],
        }
        return {"properties": {"kind": names}, "oneOf": [*schemas, lab]}

    def of_kind(self, name: str, cls: type[PartSection], kind: str) -> Schema:
        """Return the schema of a section whose kind is given."""
        schema = self.keys(name, keys_of(cls, {"kind": kind}))
        new_kinds = KINDS.get(name.removesuffix("[]"), {})
        old_kinds = [old for old, new in new_kinds.items() if new == kind]
        field = fields_of(cls)["kind"]
        meaning = schema["properties"]["kind"].get("description", "")
        if kind != "auto":
            module = registry.find(declaration(field)["parts"], kind, name)
            schema["description"] = registry.summary(module)
            meaning = f"{meaning} {kind}: {schema['description']}"
        schema["properties"]["kind"] = {
            "enum": [kind, *old_kinds],
            "description": meaning,
        }
        if kind != field.default:
            schema["required"] = sorted({*schema.get("required", []), "kind"})
        return schema

    def keys(self, name: str, fields: dict[str, FieldInfo]) -> Schema:
        """Return the schema of keys, with their old names."""
        properties = {key: self.key(key, field) for key, field in fields.items()}
        for old, new in KEYS.get(name, {}).items():
            properties[old] = {
                **properties[new],
                "deprecated": True,
                "description": f"The old name of {new}.",
            }
        schema: Schema = {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
        required = [key for key, field in fields.items() if field.is_required()]
        if required:
            schema["required"] = required
        return schema


def _value(field: FieldInfo) -> Schema:
    """Return the schema of a plain value, or of a reference in its place."""
    if field.annotation is str:
        return dict(TEXT)
    annotation: Any = field.annotation
    if field.metadata:
        annotation = Annotated[(annotation, *field.metadata)]
    try:
        schema = TypeAdapter(annotation, config=RULES).json_schema()
    # a type of a part from outside, which YAML cannot hold
    except PydanticInvalidForJsonSchema:
        return {}
    if "$defs" in schema:  # its references would lead nowhere here
        return {}
    if pair := schema.pop("prefixItems", None):  # a word of later drafts
        schema["items"] = {"anyOf": pair}
    if not schema or schema.get("type") == "object":
        return schema
    numeric = {int, float} & {field.annotation, *get_args(field.annotation)}
    text = NUMBER if numeric else REFERENCE
    return {"anyOf": [*schema.get("anyOf", [schema]), text]}
