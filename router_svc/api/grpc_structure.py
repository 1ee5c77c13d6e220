"""The structured output of gRPC requests, as the fields of the HTTP API."""

from __future__ import annotations

from pdserve.base.errors import RequestError
from pdserve.v1 import inference_pb2 as pb
from router_svc.api.parse import validate
from router_svc.api.structured import StructuredFields

#: Names of the HTTP API, where they differ.
_NAMES = {"json_schema": "json"}
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def structured_fields(request: pb.GenerateRequest) -> StructuredFields:
    """What the output has to match. Raises `RequestError`."""
    if not request.HasField("structured_output"):
        return StructuredFields()
    given = request.structured_output
    kind = given.WhichOneof("kind")
    if kind is None:
        raise RequestError("`structured_output` says nothing. Set one of its kinds.", param="structured_output")
    value: object = list(given.choice.texts) if kind == "choice" else getattr(given, kind)
    options = {field.name: option for field, option in given.ListFields() if field.name in _OPTIONS}
    return validate(StructuredFields, {"structured_outputs": {_NAMES.get(kind, kind): value, **options}})
