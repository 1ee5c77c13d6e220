"""Wrong input of every kind is refused with its reason, and does not affect other requests."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest

from pdserve.base.errors import TooLarge
from pdserve.base.sampling import SamplingParams
from router_svc.api.fields import IGNORED, UNSUPPORTED
from router_svc.api.sampling import require_bounded
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.support.tiny_model import MAX_POSITIONS, NAME, VOCAB_SIZE

COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "x"}
USER = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"model": NAME, "messages": [USER]}
DEEP = b'{"metadata": ' + b"[" * 100 + b"]" * 100 + b"}"

#: Body, status, param, and words of the message.
WRONG_COMPLETIONS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"model": "gpt-9"}, 404, "model", "does not exist"),
    ({"model": 7}, 400, "model", "valid string"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [[]]}, 400, "prompt", "empty"),
    ({"prompt": ["a", [1]]}, 400, "prompt", "mix"),
    ({"prompt": {"a": 1}}, 400, "prompt", "must be a string"),
    ({"prompt": [True]}, 400, "prompt", "must be a string"),
    ({"prompt": ["x"] * 513}, 400, "prompt", "1 to 512 prompts"),
    ({"prompt": ["x"] * 100, "n": 6}, 400, "n", "512 sequences"),
    (
        {"prompt": [0, VOCAB_SIZE]},
        400,
        "prompt",
        f"{VOCAB_SIZE} is not in the vocabulary, which has ids 0 to {VOCAB_SIZE - 1}",
    ),
    ({"prompt": [-1]}, 400, "prompt", "-1 is not in the vocabulary"),
    ({"prompt": [2**80]}, 400, "prompt", "not in the vocabulary"),
    ({"prompt": "x" * 300}, 400, "prompt", f"300 tokens, but the context holds {MAX_POSITIONS}"),
    ({"prompt": "x" * 5000}, 400, "prompt", "5000 tokens"),
    (
        {"max_tokens": MAX_POSITIONS},
        400,
        "max_tokens",
        f"`max_tokens` is {MAX_POSITIONS}, but the context holds {MAX_POSITIONS}",
    ),
    ({"max_tokens": -1}, 400, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": -5}, 400, "max_tokens", "got -5"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "valid integer"),
    ({"max_tokens": "16"}, 400, "max_tokens", "valid integer"),
    ({"max_tokens": True}, 400, "max_tokens", "valid integer"),
    ({"min_tokens": 17}, 400, "min_tokens", "at most 16"),
    ({"temperature": -0.1}, 400, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.1}, 400, "temperature", "less than or equal to 2"),
    ({"temperature": float("nan")}, 400, "temperature", "finite"),
    ({"temperature": float("inf")}, 400, "temperature", "finite"),
    ({"temperature": "hot"}, 400, "temperature", "got 'hot'"),
    ({"top_p": 0}, 400, "top_p", "greater than 0"),
    ({"top_k": -2}, 400, "top_k", "greater than or equal to -1"),
    ({"min_p": 1.1}, 400, "min_p", "less than or equal to 1"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "greater than or equal to 0.01"),
    ({"presence_penalty": 3}, 400, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty", "greater than or equal to -2"),
    ({"n": 129}, 400, "n", "less than or equal to 128"),
    ({"n": 0}, 400, "n", "greater than or equal to 1"),
    ({"logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
    ({"logprobs": True}, 400, "logprobs", "valid integer"),
    ({"seed": 2**63}, 400, "seed", "less than or equal to"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop", "at most 4"),
    ({"stop": ""}, 400, "stop[0]", "at least 1 character"),
    ({"stop": "x" * 257}, 400, "stop[0]", "at most 256 characters"),
    ({"stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids", "not in the vocabulary"),
    ({"stop_token_ids": [1] * 65}, 400, "stop_token_ids", "at most 64"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids", "at least 1"),
    ({"allowed_token_ids": [1, -1]}, 400, "allowed_token_ids[1]", "got -1"),
    ({"allowed_token_ids": [VOCAB_SIZE, 1]}, 400, "allowed_token_ids", f"{VOCAB_SIZE} is not in the vocabulary"),
    ({"allowed_token_ids": [2**31]}, 400, "allowed_token_ids", "2147483648 is not in the vocabulary"),
    ({"allowed_token_ids": [2**63]}, 400, "allowed_token_ids[0]", "less than or equal to"),
    ({"allowed_token_ids": [1] * 16_385}, 400, "allowed_token_ids", "at most 16384"),
    ({"allowed_token_ids": [1, 2.0]}, 400, "allowed_token_ids[1]", "valid integer"),
    ({"allowed_token_ids": [5], "min_tokens": 1, "stop_token_ids": [5]}, 400, "allowed_token_ids", "no token that"),
    ({"logprob_token_ids": [5]}, 400, "logprob_token_ids", "needs `logprobs`"),
    ({"logprob_token_ids": [-1], "logprobs": 0}, 400, "logprob_token_ids[0]", "got -1"),
    ({"logprob_token_ids": [VOCAB_SIZE], "logprobs": 0}, 400, "logprob_token_ids", f"{VOCAB_SIZE} is not in the"),
    ({"logprob_token_ids": [2**63], "logprobs": 0}, 400, "logprob_token_ids[0]", "less than or equal to"),
    ({"logprob_token_ids": [1] * 129, "logprobs": 0}, 400, "logprob_token_ids", "at most 128"),
    ({"logprob_token_ids": [*range(127)], "logprobs": 0, "max_tokens": 200, "n": 3}, 413, "logprobs", "65536"),
    ({"bad_words": "x"}, 400, "bad_words", "valid list"),
    ({"bad_words": [""]}, 400, "bad_words[0]", "at least 1 character"),
    ({"bad_words": ["x" * 257]}, 400, "bad_words[0]", "at most 256 characters"),
    ({"bad_words": ["x"] * 129}, 400, "bad_words", "at most 128"),
    ({"bad_words": ["x" * 256, *(f"{i}{'y' * 250}" for i in range(99))]}, 400, "bad_words", "number of tokens"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "must be token ids"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias", "must be token ids"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, 400, "logit_bias", "not in the vocabulary"),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias.1", "less than or equal to 100"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, 400, "logit_bias", "limit 300"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "requires stream"),
    ({"stream": True, "stream_options": {"odd": 1}}, 400, "stream_options.odd", "Unknown field"),
    ({"max_tokens": 0}, 400, "max_tokens", "requires echo"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "requires stream"),
    ({"prompt_logprobs": -1}, 400, "prompt_logprobs", "greater than or equal to 0"),
    ({"temprature": 1}, 400, "temprature", "did you mean `temperature`?"),
    ({"suffix": "end"}, 400, "suffix", "not supported"),
    ({"best_of": 2}, 400, "best_of", "not supported"),
    ({"messages": [USER]}, 400, "messages", "Unknown field"),
]

WRONG_CHATS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"messages": []}, 400, "messages", "at least 1"),
    ({"messages": "hi"}, 400, "messages", "valid list"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", "required"),
    ({"messages": [USER, {"role": "robot", "content": "x"}]}, 400, "messages[1].role", "got 'robot'"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0]", "requires content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "valid string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content",
        "parts of the form",
    ),
    ({"messages": [{**USER, "odd": 1}]}, 400, "messages[0].odd", "Unknown field"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        400,
        "messages[0].tool_calls[0].function",
        "required",
    ),
    ({"messages": [{"role": "developer", "content": "x"}]}, 400, "messages", "no developers here"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", f"holds {MAX_POSITIONS}"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "requires logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "less than or equal to 20"),
    ({"logprobs": 1}, 400, "logprobs", "valid boolean"),
    ({"logprobs": False, "logprob_token_ids": [1]}, 400, "logprob_token_ids", "needs `logprobs`"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_completion_tokens", "differ"),
    ({"max_completion_tokens": 250}, 400, "max_completion_tokens", "`max_completion_tokens` is 250"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", "required"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, 400, "tools[0].type", "function"),
    ({"tool_choice": "required"}, 400, "tool_choice", "needs `tools`"),
    ({"tool_choice": "some"}, 400, "tool_choice", "got 'some'"),
    ({"tool_choice": {"type": "custom"}}, 400, "tool_choice", "got 'custom'"),
    ({"tool_choice": {"type": "function"}}, 400, "tool_choice.function", "required"),
    ({"tool_choice": 5}, 400, "tool_choice", "must be none, auto or required"),
    ({"continue_final_message": True}, 400, "continue_final_message", "requires add_generation_prompt"),
    (
        {"continue_final_message": True, "add_generation_prompt": False},
        400,
        "continue_final_message",
        "last message of the assistant",
    ),
    ({"reasoning_effort": "huge"}, 400, "reasoning_effort", "'none'"),
    ({"response_format": {"type": "xml"}}, 400, "response_format", "xml"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        400,
        "response_format.json_schema.schema.not",
        "cannot be enforced",
    ),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template", "not supported"),
    ({"chat_template_kwargs": {"messages": 1}}, 400, "chat_template_kwargs.messages.[key]", "not a variable"),
    ({"chat_template_kwargs": {"mood": [1]}}, 400, "chat_template_kwargs.mood", "must be a string, a number"),
    ({"kv_transfer_params": {"remote_host": "evil"}}, 400, "kv_transfer_params", "not supported"),
]


def _require_error(status: int, body: dict[str, Any], expected: tuple[int, str | None, str]) -> None:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (status, error["code"], error["param"]) == (expected[0], expected[0], expected[1]), error
    assert expected[2] in error["message"]
    assert len(error["message"]) < 500
    # Nothing of the process: addresses in memory, paths, or lines of a traceback (CVE-2026-22778).
    assert re.search(r"0x[0-9a-f]{4}|/tmp|/home|site-packages|Traceback| at line", error["message"]) is None


async def test_every_wrong_completion_is_refused_with_its_field_and_reason(small_cluster: ScriptedCluster) -> None:
    for fields, *expected in WRONG_COMPLETIONS:
        status, body = await small_cluster.post("/v1/completions", COMPLETION | fields)
        _require_error(status, body, tuple(expected))  # type: ignore[arg-type]
    assert small_cluster.calls.decode_starts == []
    assert (await small_cluster.complete())[0] == 200


async def test_every_wrong_chat_is_refused_with_its_field_and_reason(small_cluster: ScriptedCluster) -> None:
    for fields, *expected in WRONG_CHATS:
        status, body = await small_cluster.post("/v1/chat/completions", CHAT | fields)
        _require_error(status, body, tuple(expected))  # type: ignore[arg-type]
    assert small_cluster.calls.decode_starts == []


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b'{"model": "\xff\xfe"}', 400, "not valid JSON"),
        (b"[1, 2]", 400, "must be a JSON object"),
        (b"null", 400, "must be a JSON object"),
        (DEEP, 400, "nested more than 64 levels"),
        (b"[" * 60_000, 400, "not valid JSON"),
        (b"[" * 100_000, 413, "objects, lists and keys"),
        (b'{"model": "\\ud800"}', 400, "not valid JSON"),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413, "limit of 8388608 bytes"),
    ],
    ids=["empty", "cut", "bad-utf8", "list", "null", "deep", "very-deep", "too-deep", "lone-surrogate", "10MB"],
)
async def test_a_body_that_is_not_a_request_is_refused(
    small_cluster: ScriptedCluster, data: bytes, status: int, words: str
) -> None:
    got, body = await small_cluster.post("/v1/completions", data=io.BytesIO(data))
    assert got == status
    assert words in body["error"]["message"]


async def test_other_requests_do_not_notice(small_cluster: ScriptedCluster) -> None:
    async with small_cluster.http.post(
        f"{small_cluster.base_url}/v1/completions", json=COMPLETION | {"stream": True}
    ) as stream:
        await small_cluster.post("/v1/completions", data=io.BytesIO(b"[" * 1_000_000))
        await small_cluster.post("/v1/completions", COMPLETION | {"prompt": list(range(200)) * 1000})
        text = (await stream.read()).decode()
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text


async def test_fields_that_ask_for_nothing_are_taken(small_cluster: ScriptedCluster) -> None:
    neutral = {name: values[0] if values else None for name, values in UNSUPPORTED.items()}
    ignored = dict.fromkeys(IGNORED, "whatever")
    status, body = await small_cluster.post("/v1/chat/completions", neutral | ignored | CHAT)
    assert status == 200, body


async def test_null_is_the_default_of_every_field(small_cluster: ScriptedCluster) -> None:
    names = ["temperature", "top_p", "stop", "n", "logprobs", "stream", "stream_options", "seed", "logit_bias"]
    status, body = await small_cluster.post("/v1/completions", COMPLETION | dict.fromkeys(names))
    assert status == 200, body


def test_what_multiplies_is_bounded_as_a_whole() -> None:
    """Finding 3. Fails without the limit on entries in `require_bounded`."""
    wide = SamplingParams(n=2, max_tokens=1000, logprobs=20)
    require_bounded([wide])
    with pytest.raises(TooLarge, match="prompts \\* n \\* max_tokens") as refusal:
        require_bounded([wide, wide])
    assert refusal.value.param == "logprobs"
    require_bounded([SamplingParams(n=128, max_tokens=100_000)])


async def test_unknown_paths_and_methods_answer_in_the_same_shape(small_cluster: ScriptedCluster) -> None:
    status, body = await small_cluster.get("/v1/unknown")
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    status, body = await small_cluster.get("/v1/completions")
    assert (status, body["error"]["code"]) == (405, 405)
    assert json.dumps(body)


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "1.0", "\u0661", "", "000000001" + "0" * 5000, "00000000199999"])
async def test_a_number_of_requests_beyond_its_bounds_is_refused_however_long(
    small_cluster: ScriptedCluster, limit: str
) -> None:
    status, body = await small_cluster.get(f"/v1/requests?limit={limit}")
    assert (status, body["error"]["param"]) == (400, "limit")
