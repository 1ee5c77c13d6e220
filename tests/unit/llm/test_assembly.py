"""Answers of the HTTP API become outputs: a stream ends with what the whole answer has."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve import Logprob
from pdserve.llm.assembly import Assembly

USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def _assembly(n: int = 1, num_logprobs: int | None = None) -> Assembly:
    return Assembly(request_id="r", prompt="p", n=n, num_logprobs=num_logprobs, seed=7)


def _entry(token_id: int, rank: int, *alternatives: int) -> dict[str, Any]:
    def token(each: int) -> dict[str, Any]:
        return {"token_id": each, "token": f"t{each}", "logprob": -float(each), "bytes": []}

    return {**token(token_id), "rank": rank, "top_logprobs": [token(each) for each in alternatives]}


def test_a_whole_completion_with_several_choices() -> None:
    assembly = _assembly(n=2)
    choice = {"text": "ab", "token_ids": [5, 6], "finish_reason": "stop", "stop_reason": "c", "logprobs": None}
    other = choice | {"index": 1, "text": "x", "finish_reason": "length", "stop_reason": None}
    assert assembly.add({"choices": [other, choice | {"index": 0, "prompt_token_ids": [1, 2]}], "usage": USAGE})
    output = assembly.output()
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.seed) == ("r", "p", [1, 2], 7)
    assert (output.finished, output.num_cached_tokens) == (True, 1)
    assert [(each.index, each.text, each.finish_reason, each.stop_reason) for each in output.outputs] == [
        (0, "ab", "stop", "c"),
        (1, "x", "length", None),
    ]
    assert output.outputs[0].cumulative_logprob is None


def _streamed(*choices: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"choices": [{"index": 0, "finish_reason": None} | choice], "usage": USAGE} for choice in choices]


def test_deltas_have_what_is_new_and_join_to_the_whole() -> None:
    assembly = _assembly()
    events = _streamed(
        {"text": "", "token_ids": [], "prompt_token_ids": [1]},
        {"text": "a", "token_ids": [5]},
        {"text": "", "token_ids": [6]},
        {"text": "bc", "token_ids": [7], "finish_reason": "stop", "stop_reason": 7},
    )
    assert [assembly.add(event) for event in events[:1]] == [False]
    deltas = []
    for event in events[1:]:
        assert assembly.add(event)
        [output] = assembly.delta().outputs
        deltas.append((output.text, output.token_ids, output.finish_reason))
    assert deltas == [("a", [5], None), ("", [6], None), ("bc", [7], "stop")]
    assert assembly.add({"choices": [], "usage": USAGE}) is False
    assert assembly.delta().outputs == []
    assert assembly.output().outputs[0].text == "abc"
    assert assembly.output().outputs[0].stop_reason == 7


def test_a_stop_without_text_or_tokens_is_new_too() -> None:
    assembly = _assembly()
    [event] = _streamed({"text": "", "token_ids": [], "finish_reason": "stop"})
    assert assembly.add(event)
    assert [output.finish_reason for output in assembly.delta().outputs] == ["stop"]


@pytest.mark.parametrize("is_chat", [False, True])
def test_log_probabilities_have_the_sampled_token_first_then_ranks(is_chat: bool) -> None:
    assembly = _assembly(num_logprobs=2)
    # The sampled token is third; 9 was listed by the request.
    entries = [_entry(3, 3, 1, 2, 9), _entry(1, 1, 1, 2, 9)]
    shown: dict[str, Any] = {"logprobs": {"content": entries}} if is_chat else {"logprob_entries": entries}
    [event] = _streamed({"text": "x", "token_ids": [3, 1], "finish_reason": "stop", **shown})
    assembly.add(event)
    [output] = assembly.output().outputs
    assert output.logprobs is not None
    first, second = output.logprobs
    assert list(first) == [3, 1, 2, 9]
    assert first[3] == Logprob(-3.0, 3, "t3")
    assert [each.rank for each in first.values()] == [3, 1, 2, None]
    assert {token_id: each.rank for token_id, each in second.items()} == {1: 1, 2: 2, 9: None}
    assert output.cumulative_logprob == -4.0


def test_chats_have_thinking_and_calls_streamed_and_whole() -> None:
    function = {"name": "f", "arguments": '{"a":1}'}
    whole = _assembly()
    call = {"id": "c", "type": "function", "function": function}
    message = {"content": None, "reasoning": "hm", "tool_calls": [call]}
    whole.add({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": USAGE})
    streamed = _assembly()
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning": "h"},
        {"reasoning": "m"},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    ):
        streamed.add({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": USAGE})
    streamed.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": USAGE})
    assert streamed.output() == whole.output()
    [output] = whole.output().outputs
    assert (output.text, output.reasoning) == ("", "hm")
    assert output.tool_calls == [call]


def test_log_probabilities_of_prompts_have_ids_as_numbers() -> None:
    scored = [None, {"5": {"logprob": -1.0, "rank": 2, "decoded_token": "a"}}]
    choice = {"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}
    completion: dict[str, Any] = {"choices": [choice | {"prompt_logprobs": scored}]}
    for answer in (completion, {"choices": [choice], "prompt_logprobs": scored}):
        assembly = _assembly()
        assembly.add(answer)
        assert assembly.output().prompt_logprobs == [None, {5: Logprob(-1.0, 2, "a")}]
    assert _assembly().output().prompt_logprobs is None


def test_an_abort_ends_what_has_not_ended() -> None:
    assembly = _assembly(n=2)
    assembly.add({"choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": "stop"}], "usage": USAGE})
    assert not assembly.finished
    assembly.abort()
    assert [each.finish_reason for each in assembly.output().outputs] == ["stop", "abort"]
