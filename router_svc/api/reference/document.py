"""The OpenAPI document, made of the routes that a listener serves, the types of bodies, and who may use what."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pdserve.base.errors import classes_of_status
from router_svc.api.authentication import ADMIN_ROUTES, METRICS_ROUTE, OPEN_ROUTES
from router_svc.api.reference.operations import ALWAYS, EVENTS, JSON, OPERATIONS, Answer, Operation
from router_svc.api.reference.parameters import HEADERS, RATE_LIMITS
from router_svc.api.reference.schemas import Schema, error_schema, schemas_of
from router_svc.api.reference.texts import ABOUT, TAGS

Route = tuple[str, str]

#: The API's version, which says nothing about the router: that is behind a key.
API_VERSION = "1"
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}
_ERRORS = "Error"
#: Besides the request's id, which an error has as soon as the request has one.
_HEADERS_OF_ERRORS = {
    401: ("WWW-Authenticate",),
    429: ("Retry-After", *RATE_LIMITS),
    499: ("x-should-retry",),
    503: ("Retry-After",),
    504: ("x-should-retry",),
}


def make_document(routes: Collection[Route]) -> dict[str, Any]:
    """The document of a listener with these methods and paths, as `OPERATIONS` names them."""
    served = {route: operation for route, operation in OPERATIONS.items() if route in routes}
    schemas, named = schemas_of(_bodies(served.values()), _answers(served.values()))
    statuses = sorted({status for operation in served.values() for status in _error_statuses(operation)} | {401})
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in served.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": API_VERSION, "description": ABOUT},
        # Relative to the document: a proxy may serve it below another path.
        "servers": [{"url": "."}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [{name: []} for name in _KEYS],
        "paths": paths,
        "components": {
            "schemas": dict(sorted((named | {_ERRORS: error_schema()}).items())),
            "responses": {_name_of(status): _error(status, error_schema(status)) for status in statuses},
            "headers": dict(HEADERS),
            "securitySchemes": _KEYS,
        },
    }


def encode_document(routes: Collection[Route]) -> bytes:
    """The document as JSON in UTF-8. Takes some 50 ms: call it in a thread."""
    return json.dumps(make_document(routes), ensure_ascii=False, separators=(",", ":")).encode()


def _bodies(operations: Iterable[Operation]) -> list[Any]:
    return list(dict.fromkeys(operation.body for operation in operations if operation.body is not None))


def _answers(operations: Iterable[Operation]) -> list[Any]:
    answers = [answer for operation in operations for answer in operation.answers.values()]
    kinds = [kind for answer in answers for kind in (answer.schema, answer.events)]
    return list(dict.fromkeys(kind for kind in kinds if kind is not None and not isinstance(kind, dict)))


def _operation(method: str, path: str, operation: Operation, schemas: Mapping[tuple[str, Any], Schema]) -> Schema:
    shown: Schema = {
        "operationId": _id_of(method, path),
        "tags": [operation.tag],
        "summary": operation.summary,
    }
    if path in ADMIN_ROUTES:
        needed = "an admin's key, or one with `metrics = true`" if path == METRICS_ROUTE else "an admin's key"
        shown["description"] = f"Of a router with API keys, it needs {needed}; with another one the answer is 403."
    if path in OPEN_ROUTES:
        shown["security"] = []
    if operation.parameters:
        shown["parameters"] = [parameter.as_json() for parameter in operation.parameters]
    if operation.body is not None:
        shown["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schemas["body", operation.body]}},
        }
    responses = {str(status): _answer(answer, schemas) for status, answer in operation.answers.items()}
    errors = {*_error_statuses(operation), *(() if path in OPEN_ROUTES else (401,))} - set(operation.answers)
    for status in sorted(errors):
        responses[str(status)] = {"$ref": f"#/components/responses/{_name_of(status)}"}
    return {**shown, "responses": responses}


def _error_statuses(operation: Operation) -> set[int]:
    return {*ALWAYS, *operation.errors}


def _answer(answer: Answer, schemas: Mapping[tuple[str, Any], Schema]) -> Schema:
    def schema_of(kind: Any) -> Schema:
        return kind if isinstance(kind, dict) else schemas["answer", kind]

    shown: Schema = {"description": answer.text}
    content: Schema = {}
    if answer.schema is not None:
        content[answer.media] = {"schema": schema_of(answer.schema)}
        if answer.other_media:
            content[answer.other_media] = {"schema": schema_of(answer.other_schema or answer.schema)}
    if answer.events is not None:
        content[EVENTS] = {"schema": _event(schema_of(answer.events), is_generation=answer.schema is not None)}
    if content:
        shown["content"] = content
    if answer.headers:
        shown["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in answer.headers}
    return shown


def _event(schema: Schema, *, is_generation: bool) -> Schema:
    """The schema of an event's data."""
    if not is_generation:
        return {"description": "The data of each event.", **schema}
    return {
        "description": "The data of each event. The last one is `[DONE]`, which is no JSON; "
        "an error that comes later than the first token is an event before it.",
        "anyOf": [schema, {"$ref": f"#/components/schemas/{_ERRORS}"}, {"const": "[DONE]"}],
    }


def _error(status: int, schema: Schema) -> Schema:
    texts = [" ".join((error.__doc__ or "").split("\n\n")[0].split()) for error in classes_of_status(status)]
    shown: Schema = {"description": " ".join(dict.fromkeys(texts)), "content": {JSON: {"schema": schema}}}
    names = ("X-Request-Id", *_HEADERS_OF_ERRORS.get(status, ()))
    shown["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return shown


def _name_of(status: int) -> str:
    return f"{_ERRORS}{status}"


def _id_of(method: str, path: str) -> str:
    """A name for generated clients, such as `getV1Models`."""
    words = [word for word in path.replace("{", "").replace("}", "").replace(".", "/").split("/") if word]
    slash = ["page"] if path.endswith("/") else []
    return method.lower() + "".join(word.replace("_", " ").title().replace(" ", "") for word in [*words, *slash])
