"""JSON Schemas of bodies and answers, made by pydantic from their types."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from pdserve.base.errors import all_codes
from router_svc.api.reference.texts import FIELDS

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"


class _Generator(GenerateJsonSchema):
    """Schemas without what repeats their names, and with exact rules for the keys of objects."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - pydantic's own form

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Titles only repeat the names of fields."""
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Absent fields take defaults that depend on the model, which the texts of fields name."""
        return self.generate_inner(schema["schema"])

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """An object with names of a pattern. Pydantic would leave other names free."""
        found = super().dict_schema(schema)
        for pattern, values in found.pop("patternProperties", {}).items():
            names = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
            found |= {"propertyNames": names | {"pattern": pattern}, "additionalProperties": values}
        return found


def schemas_of(
    bodies: Collection[Any], answers: Collection[Any]
) -> tuple[Mapping[tuple[str, Any], Schema], dict[str, Schema]]:
    """The schema of each type, by `("body" or "answer", type)`, and the named ones that they refer to."""
    modes: Iterable[tuple[Collection[Any], Literal["body", "answer"], JsonSchemaMode]] = (
        (bodies, "body", "validation"),
        (answers, "answer", "serialization"),
    )
    inputs = [((use, kind), mode, TypeAdapter(kind)) for kinds, use, mode in modes for kind in kinds]
    found, shared = TypeAdapter.json_schemas(inputs, ref_template=_REF, schema_generator=_Generator)
    named: dict[str, Schema] = {name: _with_texts(schema) for name, schema in shared.get("$defs", {}).items()}
    return {key: schema for (key, _), schema in found.items()}, named


def _with_texts(schema: Schema) -> Schema:
    schema.pop("title", None)
    for name, property_schema in schema.get("properties", {}).items():
        if schema.get("additionalProperties") is False and name in FIELDS:
            property_schema.setdefault("description", FIELDS[name])
    return schema


def error_schema(status: int | None = None) -> Schema:
    """The body of errors with this status; None: of any status."""
    codes = [code for code in all_codes() if status in (None, code.http)]
    types = sorted({code.openai_type for code in codes})
    values = sorted({code.openai_code or code.http for code in codes}, key=str)
    fields = {
        "message": {"type": "string", "description": "What failed, the value, the limit, and what to do."},
        "type": {"enum": types},
        "param": {"type": ["string", "null"], "description": "The field at fault."},
        "code": {"enum": values},
    }
    error = {"type": "object", "properties": fields, "required": [*fields]}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
