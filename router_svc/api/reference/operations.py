"""Every path and method of the router, with what it takes and how it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router_svc.api import operator_answers as operator
from router_svc.api.body import Body
from router_svc.api.cancel_api import Cancellation
from router_svc.api.openai import answers
from router_svc.api.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router_svc.api.reference.parameters import (
    ETAG,
    GENERATION,
    LAST_EVENT_ID,
    LIMIT,
    MODEL_NAME,
    NAME,
    RATE_LIMITS,
    RECORD_ID,
    USAGE,
    Parameter,
)
from router_svc.api.usage_api import CSV, UsageReport

#: Statuses of errors that any request may have. 401 comes with the key.
ALWAYS = (400, 403, 500)
_BODY = (413, 415, 429)
_GENERATION = (*_BODY, 404, 422, 499, 502, 503, 504)

JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer that is no error. `schema` is a type, or a JSON Schema; None: it has no body."""

    text: str
    media: str = JSON
    #: Another media type of the same content, for those that ask for it.
    other_media: str = ""
    schema: Any = None
    #: The schema of the other media type; None: the same.
    other_schema: Any = None
    #: Type of the data of each event, for an answer that may be streamed.
    events: Any = None
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `errors` are the statuses of errors besides those of `ALWAYS`."""

    tag: str
    summary: str
    answers: Mapping[int, Answer]
    body: type[Body] | None = None
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()


def _json(text: str, schema: Any) -> Mapping[int, Answer]:
    return {200: Answer(text=text, schema=schema)}


def _file(text: str, media: str) -> Mapping[int, Answer]:
    return {
        200: Answer(text=text, media=media, schema={"type": "string"}, headers=("ETag", "Content-Security-Policy")),
        304: Answer(text="The browser's copy is current.", headers=("ETag",)),
    }


_REDIRECT = {308: Answer(text="The page is at this path with a slash.", headers=("Location",))}
_PAGE = "text/html"
_FILES = "*/*"
_HEALTH_ANSWERS = {
    200: Answer(text="Yes.", schema=operator.HealthState),
    503: Answer(text="No; `reason` says why.", schema=operator.HealthState),
}


def _generation(summary: str, body: type[Body], whole: Any, chunk: Any) -> Operation:
    answer = Answer(
        text="The answer; with `stream`, server-sent events as tokens come.",
        schema=whole,
        events=chunk,
        headers=("X-Request-Id", *RATE_LIMITS),
    )
    return Operation(
        tag="Generation",
        summary=summary,
        body=body,
        answers={200: answer},
        parameters=GENERATION,
        errors=_GENERATION,
    )


def _probe(summary: str) -> Operation:
    return Operation(tag="Probes", summary=summary, answers=_HEALTH_ANSWERS)


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): _generation(
        "Continues one or several prompts", CompletionBody, answers.Completion, answers.CompletionChunk
    ),
    ("POST", "/v1/chat/completions"): _generation(
        "Continues a conversation", ChatBody, answers.ChatCompletion, answers.ChatCompletionChunk
    ),
    ("POST", "/v1/requests/{id}/cancel"): Operation(
        tag="Generation",
        summary="Ends a request of the caller, on whichever router it runs",
        answers=_json("What has become of it.", Cancellation),
        parameters=(RECORD_ID,),
        errors=(404, 415, 503),
    ),
    ("GET", "/v1/models"): Operation(
        tag="Model", summary="The model served", answers=_json("A list with one model.", answers.ModelList)
    ),
    ("GET", "/v1/models/{name}"): Operation(
        tag="Model",
        summary="The model of this name",
        answers=_json("The model.", answers.Model),
        parameters=(MODEL_NAME,),
        errors=(404,),
    ),
    ("POST", "/tokenize"): Operation(
        tag="Model",
        summary="Token ids of a prompt or a conversation",
        body=TokenizeBody,
        answers=_json("The token ids.", answers.Tokens),
        errors=(*_BODY, 404),
    ),
    ("POST", "/detokenize"): Operation(
        tag="Model",
        summary="The text of token ids, special tokens included",
        body=DetokenizeBody,
        answers=_json("The text.", answers.Detokenized),
        errors=(*_BODY, 404),
    ),
    ("GET", "/version"): Operation(
        tag="Model", summary="The router's version", answers=_json("The version.", answers.Version)
    ),
    ("GET", "/livez"): _probe("Whether the process works"),
    ("GET", "/readyz"): _probe("Whether the router takes requests"),
    ("GET", "/health"): _probe("Whether the router takes requests"),
    ("GET", "/metrics"): Operation(
        tag="Operators",
        summary="Metrics for Prometheus",
        answers={
            200: Answer(
                text="Metrics in the text format, or as OpenMetrics for those that ask for it in `Accept`.",
                media="text/plain",
                other_media="application/openmetrics-text",
                schema={"type": "string"},
            )
        },
    ),
    ("GET", "/v1/cluster"): Operation(
        tag="Operators",
        summary="Workers, load and degradations",
        answers=_json("The cluster as this router knows it.", operator.ClusterDescription),
    ),
    ("GET", "/v1/requests"): Operation(
        tag="Operators",
        summary="Recent requests of this router, the latest first",
        answers=_json("Requests of the caller's tenant; an admin's key has all.", operator.RequestList),
        parameters=(LIMIT,),
    ),
    ("GET", "/v1/requests/{id}/stream"): Operation(
        tag="Generation",
        summary="Goes on with a stream behind the last event that the client has",
        answers={
            200: Answer(
                text="Server-sent events, as the request would have had them.",
                events=answers.CompletionChunk | answers.ChatCompletionChunk,
                headers=("X-Request-Id", *RATE_LIMITS),
            )
        },
        parameters=(RECORD_ID, LAST_EVENT_ID),
        errors=(404, 409, 422, 429, 502, 503, 504),
    ),
    ("GET", "/v1/requests/{id}/trace"): Operation(
        tag="Operators",
        summary="The decision record of a request",
        answers=_json("The record; of a request whose router was lost, only its history.", operator.AnyRecord),
        parameters=(RECORD_ID,),
        errors=(404, 503),
    ),
    ("GET", "/v1/usage"): Operation(
        tag="Usage",
        summary="What tenants have used, by day and key",
        answers={
            200: Answer(
                text="Usage of the caller's tenant, or with an admin's key of all, by day of UTC. "
                "As CSV it has a line of names first.",
                schema=UsageReport,
                other_media=CSV,
                other_schema={"type": "string"},
            )
        },
        parameters=USAGE,
        errors=(413, 429, 503),
    ),
    ("GET", "/console"): Operation(tag="Console", summary="Leads to the console's page", answers=_REDIRECT),
    ("GET", "/console/"): Operation(
        tag="Console", summary="The console's page", answers=_file("The page.", _PAGE), parameters=(ETAG,)
    ),
    ("GET", "/console/{name}"): Operation(
        tag="Console",
        summary="A file of the console's page",
        answers=_file("The file.", _FILES),
        parameters=(NAME, ETAG),
        errors=(404,),
    ),
    ("GET", "/console/events"): Operation(
        tag="Console",
        summary="The states that the console shows",
        answers={
            200: Answer(
                text="Server-sent events: `state` first, then `patch` every second.", events=operator.ConsoleEvent
            )
        },
        errors=(429,),
    ),
    ("GET", "/openapi.json"): Operation(
        tag="Reference",
        summary="This document",
        answers={
            **_file("The document.", JSON),
            200: Answer(text="The document.", schema={"type": "object"}, headers=("ETag",)),
        },
        parameters=(ETAG,),
    ),
    ("GET", "/docs"): Operation(tag="Reference", summary="Leads to the page of this document", answers=_REDIRECT),
    ("GET", "/docs/"): Operation(
        tag="Reference", summary="The page of this document", answers=_file("The page.", _PAGE), parameters=(ETAG,)
    ),
    ("GET", "/docs/{name}"): Operation(
        tag="Reference",
        summary="A file of the page",
        answers=_file("The file.", _FILES),
        parameters=(NAME, ETAG),
        errors=(404,),
    ),
}
