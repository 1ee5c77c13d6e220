"""Every path and method of the router, with what it takes and how it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router_svc.api import operator_answers as operator
from router_svc.api.anthropic import answers as messages
from router_svc.api.anthropic.errors import OVERLOADED_STATUS
from router_svc.api.anthropic.schema import ConversationBody, MessagesBody
from router_svc.api.body import Body
from router_svc.api.cancel_api import Cancellation
from router_svc.api.openai import answers
from router_svc.api.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router_svc.api.reference.error_forms import MESSAGES_ERRORS, OPENAI_ERRORS, ErrorForm
from router_svc.api.reference.file_operations import FILE_OPERATIONS
from router_svc.api.reference.ollama_operations import OLLAMA_OPERATIONS
from router_svc.api.reference.operation import BODY_ERRORS, GENERATION_ERRORS, JSON, Answer, Operation
from router_svc.api.reference.parameters import (
    ETAG,
    FOLLOW,
    GENERATION,
    LAST_EVENT_ID,
    LIMIT,
    MODEL_NAME,
    NAME,
    PAGE,
    QUERIED_MODEL,
    RATE_LIMITS,
    RECORD_ID,
    RESPONSE_ID,
    USAGE,
)
from router_svc.api.reference.pooled_operations import POOLED_OPERATIONS
from router_svc.api.responses.answers import DeletedResponse, ItemList, ResponseEvent, ResponseObject
from router_svc.api.responses.schema import ResponsesBody
from router_svc.api.usage_api import CSV, UsageReport

_MESSAGE_HEADERS = ("request-id", "Pdserve-Ignored-Fields")


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


def _generation(
    summary: str,
    body: type[Body],
    whole: Any,
    chunk: Any,
    errors_form: ErrorForm = OPENAI_ERRORS,
) -> Operation:
    is_message = errors_form is MESSAGES_ERRORS
    answer = Answer(
        text="The answer; with `stream`, server-sent events as tokens come.",
        schema=whole,
        events=chunk,
        headers=("X-Request-Id", *(_MESSAGE_HEADERS if is_message else ()), *RATE_LIMITS),
    )
    return Operation(
        tag="Generation",
        summary=summary,
        body=body,
        answers={200: answer},
        parameters=GENERATION,
        errors=(*GENERATION_ERRORS, *((OVERLOADED_STATUS,) if is_message else ())),
        errors_form=errors_form,
    )


def _probe(summary: str) -> Operation:
    return Operation(tag="Probes", summary=summary, answers=_HEALTH_ANSWERS)


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **OLLAMA_OPERATIONS,
    ("POST", "/v1/completions"): _generation(
        "Continues one or several prompts", CompletionBody, answers.Completion, answers.CompletionChunk
    ),
    ("POST", "/v1/chat/completions"): _generation(
        "Continues a conversation", ChatBody, answers.ChatCompletion, answers.ChatCompletionChunk
    ),
    ("POST", "/v1/responses"): _generation(
        "Continues a conversation of items", ResponsesBody, ResponseObject, ResponseEvent
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        tag="Responses",
        summary="A stored response, as it is now, or its events",
        answers={
            200: Answer(
                text="The response; with `stream=true`, its events.", schema=ResponseObject, events=ResponseEvent
            )
        },
        parameters=(RESPONSE_ID, *FOLLOW),
        errors=(404, 503),
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        tag="Responses",
        summary="Deletes a stored response, and ends it if it runs",
        answers=_json("It is deleted.", DeletedResponse),
        parameters=(RESPONSE_ID,),
        errors=(404, 503),
    ),
    ("POST", "/v1/responses/{id}/cancel"): Operation(
        tag="Responses",
        summary="Ends a response that runs in the background",
        answers=_json("The response as far as it came; as it was if it had ended.", ResponseObject),
        parameters=(RESPONSE_ID,),
        errors=(404, 415, 503),
    ),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        tag="Responses",
        summary="The conversation that a stored response continues",
        answers=_json("Items, in pages.", ItemList),
        parameters=(RESPONSE_ID, *PAGE),
        errors=(404, 503),
    ),
    **FILE_OPERATIONS,
    ("POST", "/v1/messages"): _generation(
        "Continues a conversation, as Anthropic's API",
        MessagesBody,
        messages.MessageAnswer,
        messages.MessageEvent,
        MESSAGES_ERRORS,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        tag="Model",
        summary="The number of tokens of a conversation, without an answer to it",
        body=ConversationBody,
        answers=_json("What the message would have as its prompt.", messages.TokenCount),
        errors=(*BODY_ERRORS, 404),
        errors_form=MESSAGES_ERRORS,
    ),
    **POOLED_OPERATIONS,
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
        errors=(*BODY_ERRORS, 404),
    ),
    ("POST", "/detokenize"): Operation(
        tag="Model",
        summary="The text of token ids, special tokens included",
        body=DetokenizeBody,
        answers=_json("The text.", answers.Detokenized),
        errors=(*BODY_ERRORS, 404),
    ),
    ("GET", "/tokenizer_info"): Operation(
        tag="Model",
        summary="The tokenizer's class, special tokens and chat template",
        parameters=(QUERIED_MODEL,),
        answers=_json("What clients need to make prompts as the server does.", answers.TokenizerInfo),
        errors=(400, 404),
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
                events=answers.CompletionChunk | answers.ChatCompletionChunk | ResponseEvent | messages.MessageEvent,
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
