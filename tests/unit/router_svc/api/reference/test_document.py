"""The OpenAPI document follows the rules of OpenAPI 3.1, and its bodies are what the router accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.base.errors import RequestError
from router_svc.api.anthropic.schema import ConversationBody, MessagesBody
from router_svc.api.authentication import ADMIN_ROUTES, METRICS_ROUTE, OPEN_ROUTES
from router_svc.api.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from router_svc.api.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router_svc.api.parse import parse_body
from router_svc.api.reference.document import make_document
from router_svc.api.reference.operations import OPERATIONS
from router_svc.api.reference.texts import ABOUT, FIELDS, TAGS
from router_svc.routing.timeouts import TIMEOUT_HEADER
from tests.support.described import Description
from tests.support.lazily import openapi_spec_validator

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": ConversationBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": OllamaGenerateBody,
    "/api/show": OllamaShowBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
USER = {"role": "user", "content": "x"}
TEXT, CHAT = {"model": "m", "prompt": "x"}, {"model": "m", "messages": [USER]}
MESSAGE = CHAT | {"max_tokens": 5}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
FORMAT = {"type": "json_schema", "schema": {}}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
TOOLS = CHAT | {"tools": [FUNCTION]}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}}
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _message(*content: object, role: str = "user") -> dict[str, Any]:
    return MESSAGE | {"messages": [USER, {"role": role, "content": [*content]}, USER]}


@pytest.fixture(scope="module")
def described() -> Description:
    return Description(make_document(OPERATIONS))


def test_the_document_follows_the_rules_of_openapi(described: Description) -> None:
    openapi_spec_validator.OpenAPIV31SpecValidator(described.document).validate()
    ids = [operation["operationId"] for operation in described.operations.values()]
    assert len(set(ids)) == len(ids) == len(OPERATIONS)
    assert {tag for each in described.operations.values() for tag in each["tags"]} == {*TAGS}


def test_keys_are_needed_where_the_router_asks_for_them(described: Description) -> None:
    for (_, path), operation in described.operations.items():
        assert (operation.get("security") == []) == (path in OPEN_ROUTES)
        assert ("401" in operation["responses"]) == (path not in OPEN_ROUTES)
        assert ("admin's key" in operation.get("description", "")) == (path in ADMIN_ROUTES)
        # The only thing that such a key may read.
        assert ("`metrics = true`" in operation.get("description", "")) == (path == METRICS_ROUTE)


def test_the_longest_time_for_a_request_is_that_of_the_router() -> None:
    limited = Description(make_document(OPERATIONS, 45.0))
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        parameters = limited.operations["POST", path]["parameters"]
        assert [each["schema"]["maximum"] for each in parameters if each["name"] == TIMEOUT_HEADER] == [45.0]
        assert limited.body_errors(path, body | {"timeout": 45}) == []
        assert limited.body_errors(path, body | {"timeout": 46}) != []


def test_every_field_of_a_body_is_explained(described: Description) -> None:
    schemas = described.document["components"]["schemas"]
    bodies = [schema for schema in schemas.values() if isinstance(schema.get("additionalProperties"), bool)]
    explained = {name for schema in bodies for name, each in schema["properties"].items() if "description" in each}
    trivial = {"type", "text", "content", "tool_call_id"}
    assert {name for schema in bodies for name in schema["properties"]} - explained == trivial
    assert set(FIELDS) <= explained


def test_nothing_of_the_router_itself_is_in_the_document(described: Description) -> None:
    text = json.dumps(described.document)
    assert "127.0.0.1" not in text
    assert described.document["info"]["version"] == "1"
    assert ABOUT in described.document["info"]["description"]


def accepts(path: str, body: object) -> bool:
    """Whether the router can read this body."""
    try:
        parse_body(BODIES[path], json.dumps(body).encode())
    except RequestError:
        return False
    return True


#: Bodies at the edges of what a field takes, or of what two fields take together.
EDGES: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/completions", TEXT, True),
    ("/v1/completions", {"prompt": "x"}, False),
    ("/v1/completions", TEXT | {"model": None}, False),
    ("/v1/completions", TEXT | {"model": "m" * 257}, False),
    ("/v1/completions", TEXT | {"prompt": ""}, False),
    ("/v1/completions", TEXT | {"prompt": []}, False),
    ("/v1/completions", TEXT | {"prompt": [1, 2]}, True),
    ("/v1/completions", TEXT | {"prompt": [[1], [2]]}, True),
    ("/v1/completions", TEXT | {"prompt": [[1], []]}, False),
    ("/v1/completions", TEXT | {"prompt": ["a", "b"]}, True),
    ("/v1/completions", TEXT | {"prompt": ["a", ""]}, False),
    ("/v1/completions", TEXT | {"prompt": ["a", [1]]}, False),
    ("/v1/completions", TEXT | {"prompt": [1, True]}, False),
    ("/v1/completions", TEXT | {"prompt": ["a"] * 513}, False),
    ("/v1/completions", TEXT | {"stop": "x" * 256}, True),
    ("/v1/completions", TEXT | {"stop": ""}, False),
    ("/v1/completions", TEXT | {"stop": ["x"] * 5}, False),
    ("/v1/completions", TEXT | {"stop": []}, True),
    ("/v1/completions", TEXT | {"temperature": 2.1}, False),
    ("/v1/completions", TEXT | {"temperature": "1"}, False),
    ("/v1/completions", TEXT | {"temperature": True}, False),
    ("/v1/completions", TEXT | {"top_p": 0}, False),
    ("/v1/completions", TEXT | {"n": 129}, False),
    ("/v1/completions", TEXT | {"seed": 2**63}, False),
    ("/v1/completions", TEXT | {"seed": -(2**63)}, True),
    ("/v1/completions", TEXT | {"logit_bias": {"1": 100}}, True),
    ("/v1/completions", TEXT | {"logit_bias": {"1": 101}}, False),
    ("/v1/completions", TEXT | {"logit_bias": {str(key): 0 for key in range(301)}}, False),
    ("/v1/completions", TEXT | {"stream_options": {}}, True),
    ("/v1/completions", TEXT | {"stream_options": {"include_usage": False}, "stream": False}, True),
    ("/v1/completions", TEXT | {"stream_options": {"include_usage": True}, "stream": False}, False),
    ("/v1/completions", TEXT | {"stream_options": {"continuous_usage_stats": True}}, False),
    ("/v1/completions", TEXT | {"logprobs": False, "seed": -1, "chat_template": ""}, True),
    ("/v1/completions", TEXT | {"logprobs": True}, False),
    ("/v1/completions", TEXT | {"function_call": "auto", "kv_transfer_params": {}}, True),
    ("/v1/chat/completions", CHAT | {"logprobs": 0, "top_logprobs": 0, "chat_template": ""}, True),
    ("/v1/chat/completions", CHAT | {"logprobs": False, "top_logprobs": 1}, False),
    ("/v1/chat/completions", CHAT | {"logprobs": 1}, False),
    ("/v1/completions", TEXT | {"stream_options": {"include_usage": True}, "stream": True}, True),
    ("/v1/completions", TEXT | {"stream_options": {"user": "x"}, "stream": True}, False),
    ("/v1/completions", TEXT | {"echo": True, "logprobs": 1}, True),
    ("/v1/completions", TEXT | {"echo": True, "logprobs": 1, "max_tokens": 0, "stream": True}, True),
    ("/v1/completions", TEXT | {"echo": False, "max_tokens": 0}, False),
    ("/v1/completions", TEXT | {"max_tokens": 0, "prompt_logprobs": 1}, False),
    ("/v1/completions", TEXT | {"prompt_logprobs": 20}, True),
    ("/v1/completions", TEXT | {"prompt_logprobs": -1}, False),
    ("/v1/completions", TEXT | {"prompt_logprobs": 0, "stream": True}, False),
    ("/v1/completions", TEXT | {"prompt_logprobs": None, "stream": True}, True),
    ("/v1/chat/completions", CHAT | {"prompt_logprobs": 21}, False),
    ("/v1/chat/completions", CHAT | {"prompt_logprobs": 2}, True),
    ("/v1/chat/completions", CHAT | {"max_tokens": 0}, False),
    ("/v1/completions", TEXT | {"echo": False, "logprobs": 1}, True),
    ("/v1/completions", TEXT | {"cache_salt": "x" * 129}, False),
    ("/v1/completions", TEXT | {"cache_salt": "a@b"}, False),
    ("/v1/completions", TEXT | {"unknown": 1}, False),
    ("/v1/completions", TEXT | {"messages": [USER]}, False),
    ("/v1/completions", TEXT | {"best_of": 1, "suffix": "", "tools": [], "user": [{}], "verbosity": None}, True),
    ("/v1/completions", TEXT | {"best_of": 2}, False),
    ("/v1/completions", TEXT | {"best_of": True}, False),
    ("/v1/completions", TEXT | {"length_penalty": 1.0, "response_format": {"type": "text"}}, True),
    ("/v1/completions", TEXT | {"response_format": {"type": "json_object"}}, True),
    ("/v1/completions", TEXT | {"response_format": {"type": "json_object", "schema": {}}}, False),
    ("/v1/completions", TEXT | {"response_format": {"type": "json_schema"}}, False),
    ("/v1/completions", TEXT | {"response_format": {"type": "xml"}}, False),
    ("/v1/completions", TEXT | {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, True),
    ("/v1/completions", TEXT | {"structured_outputs": {"regexp": "a"}}, False),
    ("/v1/completions", TEXT | {"guided_choice": []}, False),
    ("/v1/chat/completions", CHAT | {"guided_json": "{}", "guided_whitespace_pattern": " "}, True),
    ("/v1/chat/completions", CHAT | {"guided_json": 1}, False),
    ("/v1/chat/completions", CHAT, True),
    ("/v1/chat/completions", CHAT | {"messages": []}, False),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "robot", "content": "x"}]}, False),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user"}]}, False),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": None}]}, False),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "assistant"}, USER]}, True),
    ("/v1/chat/completions", CHAT | {"messages": [{"content": "x"}]}, False),
    ("/v1/chat/completions", CHAT | {"messages": [USER | {"content": [{"type": "text", "text": "x"}]}]}, True),
    ("/v1/chat/completions", CHAT | {"messages": [USER | {"content": []}]}, True),
    ("/v1/chat/completions", CHAT | {"messages": [USER | {"content": [{"type": "text"}]}]}, False),
    ("/v1/chat/completions", CHAT | {"messages": [USER | {"content": [{"type": "image_url"}]}]}, False),
    ("/v1/chat/completions", CHAT | {"messages": [USER | {"tool_calls": [], "refusal": None}]}, True),
    ("/v1/chat/completions", CHAT | {"messages": [USER | {"tool_calls": [1]}]}, False),
    ("/v1/chat/completions", CHAT | {"messages": [USER | {"user": "x"}]}, False),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 1}, False),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 1, "logprobs": True}, True),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"mood": 1.5, "x": "y", "z": False}}, True),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"messages": 1}}, False),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"bos_token": "x"}}, False),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"1x": 1}}, False),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"x": None}}, False),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"x": 2**64}}, False),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"x": "y" * 4097}}, False),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {f"x{index}": 1 for index in range(17)}}, False),
    ("/v1/chat/completions", TOOLS, True),
    ("/v1/chat/completions", CHAT | {"tools": [FUNCTION] * 257}, False),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "custom", "function": {"name": "f"}}]}, False),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": {}}]}, False),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": {"name": "f g"}}]}, False),
    ("/v1/chat/completions", CHAT | {"tools": [FUNCTION | {"strict": True}]}, False),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]},
        True,
    ),
    ("/v1/chat/completions", TOOLS | {"tool_choice": "any", "parallel_tool_calls": False}, True),
    ("/v1/chat/completions", TOOLS | {"tool_choice": "always"}, False),
    ("/v1/chat/completions", TOOLS | {"tool_choice": FUNCTION}, True),
    ("/v1/chat/completions", TOOLS | {"tool_choice": {"type": "function"}}, False),
    ("/v1/chat/completions", TOOLS | {"tool_choice": ALLOWED}, True),
    ("/v1/chat/completions", TOOLS | {"tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto"}}}, False),
    ("/v1/chat/completions", TOOLS | {"parallel_tool_calls": 1}, False),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "assistant", "tool_calls": [CALLED]}, USER]}, True),
    ("/v1/chat/completions", CHAT | {"messages": [USER, {"role": "tool", "tool_call_id": "1", "content": "x"}]}, True),
    ("/v1/chat/completions", CHAT | {"messages": [USER, {"role": "tool", "tool_call_id": "1"}]}, False),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "assistant", "reasoning": "x"}, USER]}, True),
    ("/v1/chat/completions", CHAT | {"response_format": FORMAT}, False),
    ("/v1/chat/completions", CHAT | {"response_format": NAMED}, True),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, False),
    ("/v1/chat/completions", CHAT | {"response_format": "json_object"}, False),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": "xhigh", "include_reasoning": False}, True),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": "much"}, False),
    ("/v1/chat/completions", CHAT | {"thinking_token_budget": -1}, True),
    ("/v1/chat/completions", CHAT | {"thinking_token_budget": -2}, False),
    ("/v1/chat/completions", CHAT | {"documents": [{"title": "x", "text": "y"}]}, True),
    ("/v1/chat/completions", CHAT | {"documents": ["x"]}, False),
    ("/v1/messages", MESSAGE, True),
    ("/v1/messages", CHAT, False),
    ("/v1/messages", MESSAGE | {"max_tokens": 0}, False),
    ("/v1/messages", MESSAGE | {"messages": []}, False),
    ("/v1/messages", MESSAGE | {"unknown": 1, "documents": [1], "tool_choice": None}, True),
    ("/v1/messages", MESSAGE | {"system": ""}, True),
    ("/v1/messages", MESSAGE | {"system": [{"type": "text", "text": "x", "more": {}}]}, True),
    ("/v1/messages", MESSAGE | {"system": [{"type": "image"}]}, False),
    ("/v1/messages", MESSAGE | {"stop_sequences": ["x"] * 4}, True),
    ("/v1/messages", MESSAGE | {"stop_sequences": "x"}, False),
    ("/v1/messages", MESSAGE | {"temperature": "1"}, False),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "enabled", "budget_tokens": 0}}, False),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "always"}}, False),
    ("/v1/messages", MESSAGE | {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, True),
    ("/v1/messages", MESSAGE | {"tools": [{"name": "f", "input_schema": {}, "type": "custom", "more": 1}]}, True),
    ("/v1/messages", MESSAGE | {"tools": [{"name": "f"}]}, False),
    ("/v1/messages", MESSAGE | {"tools": [{"name": "bash", "input_schema": {}, "type": "bash_20250124"}]}, False),
    ("/v1/messages", MESSAGE | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, True),
    ("/v1/messages", MESSAGE | {"tool_choice": {"type": "tool"}}, False),
    ("/v1/messages", MESSAGE | {"tool_choice": "auto"}, False),
    ("/v1/messages", MESSAGE | {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, True),
    ("/v1/messages", MESSAGE | {"output_config": {"effort": "some"}}, False),
    ("/v1/messages", MESSAGE | {"output_config": {"format": FORMAT}, "output_format": FORMAT}, False),
    ("/v1/messages", MESSAGE | {"output_config": {"effort": "low"}, "output_format": FORMAT}, True),
    ("/v1/messages", MESSAGE | {"output_config": {"format": FORMAT}, "output_format": None}, True),
    ("/v1/messages", _message({"type": "text", "text": "x"}, RESULT), True),
    ("/v1/messages", _message(RESULT | {"content": "x"}, RESULT | {"content": [{"type": "text", "text": "x"}]}), True),
    ("/v1/messages", _message(RESULT | {"content": [{"type": "image"}]}), False),
    ("/v1/messages", _message(CALL), False),
    ("/v1/messages", _message({"type": "image"}), False),
    ("/v1/messages", _message("x"), False),
    ("/v1/messages", _message(CALL, {"type": "thinking", "thinking": "x"}, role="assistant"), True),
    ("/v1/messages", _message({"type": "redacted_thinking", "data": "x"}, role="assistant"), True),
    ("/v1/messages", _message(RESULT, role="assistant"), False),
    ("/v1/messages", _message({"type": "text", "text": "x"}, role="system"), True),
    ("/v1/messages", _message({"type": "text", "text": "x"}, role="tool"), False),
    ("/v1/messages/count_tokens", CHAT, True),
    ("/v1/messages/count_tokens", MESSAGE, True),
    ("/v1/messages/count_tokens", {"model": "m"}, False),
    ("/api/chat", CHAT, True),
    ("/api/chat", CHAT | {"keep_alive": "5m", "options": {"num_ctx": 9}, "more": 1}, True),
    ("/api/chat", CHAT | {"messages": []}, False),
    ("/api/chat", CHAT | {"messages": [{"role": "developer", "content": "x"}]}, False),
    ("/api/chat", CHAT | {"messages": [{"role": "tool", "content": "x", "tool_name": "f"}]}, True),
    ("/api/chat", CHAT | {"messages": [USER | {"images": []}]}, True),
    ("/api/chat", CHAT | {"messages": [USER | {"images": ["AA=="]}]}, False),
    ("/api/chat", CHAT | {"messages": [USER | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]}, True),
    ("/api/chat", CHAT | {"messages": [USER | {"tool_calls": [{"function": {"name": "f"}}]}]}, False),
    ("/api/chat", CHAT | {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, True),
    ("/api/chat", CHAT | {"tools": [{"type": "browser", "function": {"name": "f"}}]}, False),
    ("/api/chat", CHAT | {"options": {"num_predict": -2, "stop": ["x"], "repeat_penalty": 1.1}}, True),
    ("/api/chat", CHAT | {"options": {"num_predict": -3}}, False),
    ("/api/chat", CHAT | {"options": {"temperature": "1"}}, False),
    ("/api/chat", CHAT | {"format": ""}, True),
    ("/api/chat", CHAT | {"format": {"type": "object"}}, True),
    ("/api/chat", CHAT | {"format": "xml"}, False),
    ("/api/chat", CHAT | {"think": "high"}, True),
    ("/api/chat", CHAT | {"think": False}, True),
    ("/api/chat", CHAT | {"think": "some"}, False),
    ("/api/chat", CHAT | {"think": 1}, False),
    ("/api/generate", TEXT, True),
    ("/api/generate", TEXT | {"prompt": ""}, False),
    ("/api/generate", TEXT | {"system": "x", "raw": False}, True),
    ("/api/generate", TEXT | {"system": "x", "raw": True}, False),
    ("/api/generate", TEXT | {"system": "", "raw": True, "template": "", "suffix": "", "context": []}, True),
    ("/api/generate", TEXT | {"suffix": "x"}, False),
    ("/api/generate", TEXT | {"template": "x"}, False),
    ("/api/generate", TEXT | {"context": [1]}, False),
    ("/api/generate", TEXT | {"images": ["AA=="]}, False),
    ("/api/show", {"model": "m", "verbose": True}, True),
    ("/api/show", {"name": "m"}, False),
    ("/tokenize", {"prompt": ""}, True),
    ("/tokenize", {}, False),
    ("/tokenize", {"prompt": "x", "messages": [USER]}, False),
    ("/tokenize", {"prompt": None, "messages": [USER]}, True),
    ("/tokenize", {"prompt": [1]}, False),
    ("/detokenize", {"tokens": []}, True),
    ("/detokenize", {"tokens": [1.5]}, False),
    ("/detokenize", {"tokens": None}, False),
]


@pytest.mark.parametrize(("path", "body", "is_allowed"), EDGES, ids=[str(index) for index in range(len(EDGES))])
def test_the_router_and_the_document_agree_on_a_body(
    described: Description, path: str, body: dict[str, Any], is_allowed: bool
) -> None:
    assert accepts(path, body) == is_allowed
    assert (described.body_errors(path, body) == []) == is_allowed


@pytest.mark.parametrize(
    ("path", "change"),
    [
        # The document names letters of ASCII only, and bounds floating-point numbers as it does integers.
        ("/v1/chat/completions", lambda body: body | {"chat_template_kwargs": {"größe": 1}}),
        ("/v1/chat/completions", lambda body: body | {"chat_template_kwargs": {"x": 1e300}}),
        # Several demands are refused where they are made into a grammar, and so are none.
        ("/v1/completions", lambda body: body | {"structured_outputs": {"regex": None}}),
        ("/v1/completions", lambda body: body | {"structured_outputs": {"regex": "a", "json_object": True}}),
        # What they have to be is known with the model, hence later.
        ("/v1/completions", lambda body: body | {"prompt": [-1], "logit_bias": {"x": 1}}),
    ],
)
def test_where_the_router_reads_more_than_the_document_allows(
    described: Description, path: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    body = change(TEXT if path == "/v1/completions" else CHAT)
    assert accepts(path, body)
    assert described.body_errors(path, body) != []


def test_an_integer_with_a_fraction_is_refused_although_json_schema_takes_it(described: Description) -> None:
    body = TEXT | {"n": 1.0}
    assert not accepts("/v1/completions", body)
    assert described.body_errors("/v1/completions", body) == []
    assert "1.0 is no integer here" in ABOUT
