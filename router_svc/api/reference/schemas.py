"""JSON Schemas of bodies and answers, made by pydantic from their types."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

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
        # Objects of answers say nothing of other properties.
        if isinstance(schema.get("additionalProperties"), bool) and name in FIELDS:
            property_schema.setdefault("description", FIELDS[name])
    return schema
