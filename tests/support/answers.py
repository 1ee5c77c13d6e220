"""Requests of every kind, sent alone or in a crowd, and their answers without the fields that always differ."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.support.cluster import MODEL, Cluster

Json = Any

COMPLETIONS = "/v1/completions"
_COMMENT = re.compile(r"^:[^\n]*\n+", re.MULTILINE)
CHAT = "/v1/chat/completions"

#: A template. Whatever the model is, an answer to this starts within thinking.
OPEN_THINKING = (
    "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)

_TOPICS = ("the sea", "a small dog", "prime numbers", "Seoul", "winter", "bread", "a lost key", "trains")
_MANUAL = " ".join(
    f"Rule {number}: whoever writes about {_TOPICS[number % 8]} keeps it to {number + 3} lines." for number in range(34)
)
#: From a handful of tokens to about 590. Several start alike, and two are equal.
_PROMPTS = (
    "Once upon a time",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "대한민국의 수도는 어디인가요? 그리고",
    "I love you 😀😃 and 👩‍👩‍👧‍👦 because",
    "to be or not to be " * 20,
    _MANUAL[:700],
    f"{_MANUAL[:700]} Write about bread.",
    f"{_MANUAL[:1500]} Write about trains.",
    f"{_MANUAL[:1500]} Write about trains.",
    _MANUAL[:1800],
    _MANUAL,
    # Whole blocks. If all of them are cached, the last token still has to be computed again.
    " bread" * 128,
)
_SCHEMA: Mapping[str, Json] = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["title", "count"],
    "additionalProperties": False,
}
#: `top` is the number of alternatives with log-probabilities. The two endpoints have different fields for it.
_OPTIONS: tuple[Mapping[str, Json], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0, "top": 5},
    {"temperature": 1.0, "seed": -7, "top_p": 0.9},
    {"temperature": 0.9, "seed": 3, "n": 3},
    {"temperature": 1.3, "seed": 2**40, "top_k": 40, "top": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"temperature": 0, "stop": ["e", "\n"]},
    {"temperature": 1.0, "seed": 11, "min_p": 0.05, "n": 3, "top": 3},
    {"temperature": 0, "max_tokens": 1, "top": 2},
    {"temperature": 0.6, "seed": 8, "logit_bias": {"260": 4.0, "284": -100.0}},
    {"temperature": 1.5, "seed": 13, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0, "frequency_penalty": 1.0, "n": 2, "top": 1},
    {"temperature": 0.9, "seed": 21, "stop": ["the"], "include_stop_str_in_output": True, "n": 3},
    {"temperature": 1.1, "seed": 34, "ignore_eos": True, "min_tokens": 6, "stop_token_ids": [28, 30]},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
    {"temperature": 0.9, "seed": 55, "structured_outputs": {"regex": "([A-Z][a-z]+ ){2,9}"}, "n": 2, "top": 2},
    {
        "temperature": 0.8,
        "seed": 89,
        "n": 2,
        "top": 1,
        "logprob_token_ids": [28, 30, 260],
        "allowed_token_ids": [*range(20, 4000, 2)],
        "bad_words": ["the", "in a", "of the"],
    },
)
#: Short, since it is described in each prompt.
_TOOLS = [{"type": "function", "function": {"name": "note", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
#: For chats alone.
_CHAT_OPTIONS: tuple[Mapping[str, Json], ...] = (
    *({}, {}),
    {"tools": _TOOLS, "tool_choice": "required"},
    {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "note"}}},
    {"tools": _TOOLS},
)
#: Coprime to each other and to the ways of sending: the requests below are all different.
_LENGTHS = (8, 17, 24, 12, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request."""

    path: str
    body: Mapping[str, Json]
    stream: bool

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        n: int = self.body.get("n", 1)
        return n

    def turned(self) -> Call:
        """The same request, streamed if this one is whole, and whole if this one is streamed."""
        return Call(path=self.path, body=self.body, stream=not self.stream)

    def wire(self) -> dict[str, Json]:
        """The body to send."""
        more = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return {"model": MODEL, **self.body, **more}


def make_calls(count: int) -> list[Call]:
    """`count` different requests: greedy and sampled, completions and chats, streamed and whole."""
    return [_call(number) for number in range(count)]


def _call(number: int) -> Call:
    prompt = _PROMPTS[number % len(_PROMPTS)]
    options = {"max_tokens": _LENGTHS[number % len(_LENGTHS)], **_OPTIONS[number % len(_OPTIONS)]}
    top = options.pop("top", None)
    if number % 3 == 1:
        body: dict[str, Json] = {"messages": [{"role": "user", "content": prompt}], **options}
        body |= _CHAT_OPTIONS[number // 3 % len(_CHAT_OPTIONS)]
        if "tools" in body:
            body.pop("allowed_token_ids", None)  # Calls have tokens that the list lacks.
        if top is not None:
            body |= {"logprobs": True, "top_logprobs": top}
        return Call(path=CHAT, body=body, stream=number % 4 < 2)
    # Every eighth asks for two prompts at once.
    body = {"prompt": [prompt, f"{prompt} and"] if number % 8 == 5 else prompt, **options}
    if top is not None:
        body["logprobs"] = top
    return Call(path=COMPLETIONS, body=body, stream=number % 4 < 2)


async def send_all(cluster: Cluster, calls: Sequence[Call], *, at_once: int) -> list[str]:
    """The answers, in the order of the calls; at most `at_once` requests are in flight at a time."""
    gate = asyncio.Semaphore(at_once)
    # The slowest instruction set needs minutes for a crowd, so only the test itself has a deadline.
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(cluster.base_url, timeout=timeout) as session, asyncio.TaskGroup() as tasks:

        async def one(call: Call) -> str:
            async with gate, session.post(call.path, json=call.wire()) as response:
                text = await response.text()
                assert response.status == 200, f"{call.wire()}: {response.status} {text}"
                return canonical(_merge(text) if call.stream else _parse(text))

        sent = [tasks.create_task(one(call)) for call in calls]
    return [task.result() for task in sent]


def canonical(answer: dict[str, Json]) -> str:
    """An answer as JSON text, without its id, its time and what it found in caches."""
    del answer["id"], answer["created"]
    # The number of cached tokens depends on the cache. Nothing else in an answer may.
    del answer["usage"]["prompt_tokens_details"]
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]  # Made of the answer's.
    return json.dumps(answer, ensure_ascii=False, indent=1)


def _parse(text: str) -> dict[str, Json]:
    """The answer with numbers as text: 0.1 and 0.10 are different answers."""
    parsed: dict[str, Json] = json.loads(text, parse_float=str)
    return parsed


def _merge(text: str) -> dict[str, Json]:
    """The events of a stream, merged into the answer that an unstreamed request would get."""
    # A stream that is silent for long has comments.
    lines = _COMMENT.sub("", text).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], f"the stream ends with {lines[-2:]}"
    chunks = [_parse(line.removeprefix("data: ")) for line in lines[:-2]]
    first, last = chunks[0], chunks[-1]
    for chunk in chunks:
        assert "error" not in chunk, f"the stream ends with {chunk}"
        assert {**chunk, "choices": 0, "usage": 0} == {**first, "choices": 0, "usage": 0}, (
            f"{chunk} differs from the first chunk"
        )
        assert (chunk["usage"] is None) is (chunk is not last), "usage is not in the last chunk alone"
    choices: dict[int, dict[str, Json]] = {}
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        _add(choices.setdefault(piece["index"], _empty(piece)), piece)
    return {
        **first,
        "object": first["object"].removesuffix(".chunk"),
        "choices": [choices[index] for index in sorted(choices)],
        "usage": last["usage"],
    }


def _empty(piece: dict[str, Json]) -> dict[str, Json]:
    """A whole choice before its first piece."""
    content: dict[str, Json] = (
        {"message": {"role": "assistant", "content": "", "refusal": None}} if "delta" in piece else {"text": ""}
    )
    return {"index": piece["index"], **content, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _add(choice: dict[str, Json], piece: dict[str, Json]) -> None:
    assert choice["finish_reason"] is None, f"choice {piece['index']} goes on after its end"
    if "delta" in piece:
        _add_delta(choice["message"], piece["delta"])
    else:
        choice["text"] += piece["text"]
    for name, values in (piece["logprobs"] or {}).items():
        if choice["logprobs"] is None:
            choice["logprobs"] = dict.fromkeys(piece["logprobs"])
        if values is not None:
            choice["logprobs"][name] = [*(choice["logprobs"][name] or ()), *values]
    choice["finish_reason"] = piece["finish_reason"]
    choice["stop_reason"] = piece.get("stop_reason")


def _add_delta(message: dict[str, Json], delta: dict[str, Json]) -> None:
    message["content"] = (message["content"] or "") + delta.get("content", "")
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            function = {"name": call["function"]["name"], "arguments": ""}
            calls.append({"id": call["id"], "type": call["type"], "function": function})
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if "tool_calls" in message:
        message["content"] = message["content"] or None


def differences(calls: Sequence[Call], answers: Sequence[str], expected: Sequence[str]) -> str:
    """The differences, as a failing test's message. Empty if every answer is as expected."""
    stories = [
        f"request {number}: {json.dumps(call.wire(), ensure_ascii=False)[:300]}\n{_first_difference(one, other)}"
        for number, (call, one, other) in enumerate(zip(calls, answers, expected, strict=True))
        if one != other
    ]
    return "\n".join([f"{len(stories)} of {len(calls)} answers differ", *stories[:5]]) if stories else ""


def _first_difference(one: str, other: str) -> str:
    ours, expected = one.splitlines(), other.splitlines()
    for number, (line, wanted) in enumerate(zip(ours, expected, strict=False)):
        if line != wanted:
            context = "".join(f"    {same}\n" for same in expected[max(0, number - 3) : number])
            return f"{context}  - {wanted}\n  + {line}"
    return f"  {len(expected)} lines were expected, and {len(ours)} came"
