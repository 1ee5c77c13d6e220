"""The OpenAPI document, made of the routes that a listener serves, the types of bodies, and who may use what."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from router_svc.api.anthropic.errors import OVERLOADED_STATUS
from router_svc.api.authentication import ADMIN_ROUTES, METRICS_ROUTE, OPEN_ROUTES
from router_svc.api.reference.error_forms import OPENAI_ERRORS, ErrorForm
from router_svc.api.reference.operation import ALWAYS, EVENTS, FORM, JSON, LINES, Answer, Operation
from router_svc.api.reference.operations import OPERATIONS
from router_svc.api.reference.parameters import HEADERS, RATE_LIMITS
from router_svc.api.reference.schemas import Schema, schemas_of
from router_svc.api.reference.texts import ABOUT, TAGS
from router_svc.routing.timeouts import MAX_TIMEOUT_S, TIMEOUT_FIELD, TIMEOUT_HEADER

Route = tuple[str, str]

#: The API's version, which says nothing about the router: that is behind a key.
API_VERSION = "1"
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}
#: Headers of errors besides the request's id, which an error has as soon as the request has one.
_HEADERS_OF_ERRORS = {
    401: ("WWW-Authenticate",),
    429: ("Retry-After", *RATE_LIMITS),
    499: ("x-should-retry",),
    503: ("Retry-After",),
    OVERLOADED_STATUS: ("Retry-After",),
    504: ("x-should-retry",),
}


def make_document(routes: Collection[Route], max_timeout_s: float = MAX_TIMEOUT_S) -> dict[str, Any]:
    """The document of a listener with these methods and paths, as `OPERATIONS` names them."""
    served = {route: operation for route, operation in OPERATIONS.items() if route in routes}
    schemas, named = schemas_of(_bodies(served.values()), _answers(served.values()))
    forms = {operation.errors_form for operation in served.values()}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in served.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, schemas)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": API_VERSION, "description": ABOUT},
        # Relative to the document: a proxy may serve it below another path.
        "servers": [{"url": "."}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [{name: []} for name in _KEYS],
        "paths": paths,
        "components": {
            "schemas": dict(sorted((named | {form.name: form.schema(None) for form in forms}).items())),
            "responses": dict(sorted(_responses(served.values()).items())),
            "headers": dict(HEADERS),
            "securitySchemes": _KEYS,
        },
    }
    _bound_timeouts(document, max_timeout_s)
    return document


def _bound_timeouts(document: Schema, max_s: float) -> None:
    """Says how long the router lets requests take: its own limit, which the types of bodies do not know."""
    operations = (operation for methods in document["paths"].values() for operation in methods.values())
    found = [
        parameter["schema"]
        for operation in operations
        for parameter in operation.get("parameters", ())
        if parameter["name"] == TIMEOUT_HEADER
    ]
    for schema in document["components"]["schemas"].values():
        alternatives = schema.get("properties", {}).get(TIMEOUT_FIELD, {}).get("anyOf", ())
        found += [each for each in alternatives if each.get("type") == "number"]
    for schema in found:
        schema["maximum"] = max_s


def _responses(operations: Iterable[Operation]) -> dict[str, Schema]:
    """The answers that are errors, by name."""
    return {
        _name_of(status, operation.errors_form): _error(status, operation.errors_form)
        for operation in operations
        for status in {*_error_statuses(operation), 401}
    }


def encode_document(routes: Collection[Route], max_timeout_s: float = MAX_TIMEOUT_S) -> bytes:
    """The document as JSON in UTF-8. Takes some 50 ms: call it in a thread."""
    return json.dumps(make_document(routes, max_timeout_s), ensure_ascii=False, separators=(",", ":")).encode()


def _bodies(operations: Iterable[Operation]) -> list[Any]:
    return list(dict.fromkeys(operation.body for operation in operations if operation.body is not None))


def _answers(operations: Iterable[Operation]) -> list[Any]:
    answers = [answer for operation in operations for answer in operation.answers.values()]
    kinds = [kind for answer in answers for kind in (answer.schema, answer.events, answer.lines)]
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
    if operation.form is not None:
        shown["requestBody"] = {"required": True, "content": {FORM: {"schema": dict(operation.form)}}}
    form = operation.errors_form
    responses = {str(status): _answer(answer, schemas, form) for status, answer in operation.answers.items()}
    errors = {*_error_statuses(operation), *(() if path in OPEN_ROUTES else (401,))} - set(operation.answers)
    for status in sorted(errors):
        responses[str(status)] = {"$ref": f"#/components/responses/{_name_of(status, form)}"}
    return {**shown, "responses": responses}


def _error_statuses(operation: Operation) -> set[int]:
    return {*ALWAYS, *operation.errors}


def _answer(answer: Answer, schemas: Mapping[tuple[str, Any], Schema], form: ErrorForm) -> Schema:
    def schema_of(kind: Any) -> Schema:
        return kind if isinstance(kind, dict) else schemas["answer", kind]

    shown: Schema = {"description": answer.text}
    content: Schema = {}
    if answer.schema is not None:
        content[answer.media] = {"schema": schema_of(answer.schema)}
        if answer.other_media:
            content[answer.other_media] = {"schema": schema_of(answer.other_schema or answer.schema)}
    if answer.events is not None:
        content[EVENTS] = {"schema": _event(schema_of(answer.events), form if answer.schema is not None else None)}
    if answer.lines is not None:
        content[LINES] = {"schema": _line(schema_of(answer.lines), form)}
    if content:
        shown["content"] = content
    if answer.headers:
        shown["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in answer.headers}
    return shown


def _event(schema: Schema, form: ErrorForm | None) -> Schema:
    """The schema of the JSON in an event's `data`. `form`: that of errors among them; None: there are none."""
    if form is None:
        return {"description": "The JSON in the `data` of each event.", **schema}
    shown = [schema, {"$ref": f"#/components/schemas/{form.name}"}]
    late = "An error that comes later than the first token is an event"
    last = ", the last one." if form is not OPENAI_ERRORS else ". The last one has `[DONE]` instead of JSON."
    return {"description": f"The JSON in the `data` of each event. {late}{last}", "anyOf": shown}


def _line(schema: Schema, form: ErrorForm) -> Schema:
    """The schema of a line."""
    late = "Each line. An error that comes later than the first token is the last one."
    return {"description": late, "anyOf": [schema, {"$ref": f"#/components/schemas/{form.name}"}]}


def _error(status: int, form: ErrorForm) -> Schema:
    texts = [" ".join((error.__doc__ or "").split("\n\n")[0].split()) for error in form.classes(status)]
    content = {JSON: {"schema": form.schema(status)}}
    shown: Schema = {"description": " ".join(dict.fromkeys(texts)), "content": content}
    names = ("X-Request-Id", *_HEADERS_OF_ERRORS.get(status, ()))
    shown["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return shown


def _name_of(status: int, form: ErrorForm) -> str:
    return f"{form.name}{status}"


def _id_of(method: str, path: str) -> str:
    """A name for generated clients, such as `getV1Models`."""
    words = [word for word in path.replace("{", "").replace("}", "").replace(".", "/").split("/") if word]
    slash = ["page"] if path.endswith("/") else []
    return method.lower() + "".join(word.replace("_", " ").title().replace(" ", "") for word in [*words, *slash])
