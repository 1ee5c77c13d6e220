"""What a client got, in a form that is equal for equal tokens, however they were cut into events. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pdserve.base.errors import PdserveError

_SHOWN_CHARACTERS = 60


class ErrorInStream(PdserveError):
    """An event of a stream is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEvent:
    """A server-sent event."""

    data: str
    #: What `Last-Event-ID` asks to go on behind; None: the event has none.
    id: str | None


class Events:
    """Cuts a byte stream into events. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._id: str | None = None

    def feed(self, data: bytes) -> list[AnswerEvent]:
        """Adds bytes; returns the events that are now complete."""
        *blocks, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return [event for block in blocks if (event := self._event(block.decode())) is not None]

    def _event(self, block: str) -> AnswerEvent | None:
        data = []
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
            elif name == "id":
                self._id = value.removeprefix(" ")
        return AnswerEvent(data="\n".join(data), id=self._id) if data else None


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a function. A name that comes twice is there twice."""

    name: str = ""
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One choice. A list has an entry per time that something came, so that what comes twice is seen."""

    text: str = ""
    reasoning: str = ""
    #: By their index.
    calls: dict[int, Call] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def texts(self) -> dict[str, str]:
        """All that the model has written, by what it is."""
        named = {"text": self.text, "reasoning": self.reasoning}
        for index, call in sorted(self.calls.items()):
            named |= {f"name of call {index}": call.name, f"arguments of call {index}": call.arguments}
        return named


@dataclass(slots=True, kw_only=True)
class Answer:
    """A whole answer, or the head of one."""

    choices: dict[int, Choice] = field(default_factory=dict)
    #: Tokens of the prompt, of the completion, and of the reasoning in it, for each time that they came.
    usages: list[tuple[int, int, int]] = field(default_factory=list)
    #: Ids of the response in its chunks.
    ids: set[str] = field(default_factory=set)
    is_complete: bool = False

    def add(self, content: Any) -> bool:
        """Takes in a chunk or a whole response; returns whether it had tokens. Raises `ErrorInStream`."""
        if not isinstance(content, dict) or content.get("error"):
            raise ErrorInStream(str(content)[:300])
        self.ids.add(str(content.get("id")))
        if usage := content.get("usage"):
            details = usage.get("completion_tokens_details") or {}
            reasoning_tokens = details.get("reasoning_tokens", 0)
            self.usages.append((usage["prompt_tokens"], usage["completion_tokens"], reasoning_tokens))
        has_tokens = False
        for choice in content.get("choices", ()):
            has_tokens |= self._add_choice(choice)
        return has_tokens

    def _add_choice(self, choice: dict[str, Any]) -> bool:
        into = self.choices.setdefault(choice["index"], Choice())
        message = choice.get("delta") or choice.get("message") or {}
        text, reasoning = choice.get("text") or message.get("content") or "", message.get("reasoning") or ""
        calls = message.get("tool_calls") or ()
        into.text += text
        into.reasoning += reasoning
        for position, given in enumerate(calls):
            call = into.calls.setdefault(given.get("index", position), Call())
            call.name += given["function"].get("name", "")
            call.arguments += given["function"]["arguments"]
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:
            into.logprobs += logprobs["content"] or []
        elif logprobs:
            columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
            into.logprobs += map(list, zip(*columns, strict=True))
        if choice.get("finish_reason"):
            into.finish_reasons.append(f"{choice['finish_reason']}:{choice.get('stop_reason')}")
        return bool(text or reasoning or calls or logprobs or choice.get("finish_reason"))


def read_event(event: AnswerEvent) -> Any:
    """The JSON of an event; None for the last one."""
    return None if event.data == "[DONE]" else json.loads(event.data)


def difference(got: Answer, expected: Answer) -> str | None:
    """The first difference in words; None if the client got what it should."""
    if not got.is_complete:
        return "the answer is not complete"
    if len(got.ids) != 1:
        return f"the chunks have {len(got.ids)} ids: {sorted(got.ids)}"
    if got.usages != expected.usages:
        return f"usage is {got.usages}, expected {expected.usages}"
    if got.choices.keys() != expected.choices.keys():
        return f"choices are {sorted(got.choices)}, expected {sorted(expected.choices)}"
    for index, choice in expected.choices.items():
        if found := _choice_difference(got.choices[index], choice):
            return f"choice {index}: {found}"
    return None


def head_difference(got: Answer, expected: Answer) -> str | None:
    """The same for a client that left: what it got is the head of the answer."""
    for index, choice in got.choices.items():
        whole = expected.choices.get(index, Choice())
        wanted = whole.texts()
        for name, text in choice.texts().items():
            if not wanted.get(name, "").startswith(text):
                return f"choice {index}: {_text_difference(name, text, wanted.get(name, ''))}"
        if whole.logprobs[: len(choice.logprobs)] != choice.logprobs:
            return f"choice {index}: log-probabilities differ"
    return None


def _choice_difference(got: Choice, expected: Choice) -> str | None:
    texts, wanted = got.texts(), expected.texts()
    if texts.keys() != wanted.keys():
        return f"calls are {sorted(got.calls)}, expected {sorted(expected.calls)}"
    for name, text in texts.items():
        if text != wanted[name]:
            return _text_difference(name, text, wanted[name])
    if got.finish_reasons != expected.finish_reasons:
        return f"finish reasons are {got.finish_reasons}, expected {expected.finish_reasons}"
    if got.logprobs != expected.logprobs:
        pairs = zip(got.logprobs, expected.logprobs, strict=False)
        shorter = min(len(got.logprobs), len(expected.logprobs))
        at = next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)
        return f"log-probabilities differ at token {at} ({len(got.logprobs)} and {len(expected.logprobs)})"
    return None


def _text_difference(name: str, got: str, expected: str) -> str:
    pairs = zip(got, expected, strict=False)
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(got), len(expected)))
    shown, wanted = got[at : at + _SHOWN_CHARACTERS], expected[at : at + _SHOWN_CHARACTERS]
    return f"{name} at character {at} of {len(expected)}: {shown!r}, expected {wanted!r}"
