"""How a response looks, streamed and whole; completions and chat differ only in what a choice holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pdserve
from pdserve.base.sampling import FinishReason, TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.openai.jobs import Job
from router_svc.api.openai.logprobs import chat_logprobs, completion_logprobs
from router_svc.records.record import Json
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage

_FINGERPRINT = f"pdserve-{pdserve.__version__}"

Fields = dict[str, Json]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(value: Json) -> bytes:
    """As compact as can be, in UTF-8."""
    return _encode(value).encode()


@dataclass(slots=True)
class Collected:
    """Everything one choice has gained."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Adds what the choice gained last."""
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class ChoiceFormat(Protocol):
    """What an endpoint's choices hold."""

    chunk_object: str
    whole_object: str

    def opening(self, index: int) -> Fields | None:
        """What a choice says before its first token, if anything."""

    def part(self, delta: ChoiceDelta) -> Fields:
        """What a chunk says. Called in order: formats may count."""

    def whole(self, index: int, collected: Collected) -> Fields:
        """The complete choice."""


class CompletionFormat:
    """Choices with `text`."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        choices_per_prompt = job.generations[0].sampling.n
        self._echoes = [echo for echo in job.echoes for _ in range(choices_per_prompt)]
        #: Characters of the tokens each choice has had so far.
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Fields | None:
        """The prompt, when it is to be repeated."""
        if not self._echoes:
            return None
        return {"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None}

    def part(self, delta: ChoiceDelta) -> Fields:
        """New text."""
        index = delta.choice_index
        logprobs = self._logprobs(index, delta.token_ids, delta.logprobs)
        return {"index": index, "text": delta.text, "logprobs": logprobs, **_ending(delta)}

    def whole(self, index: int, collected: Collected) -> Fields:
        """All text, after the prompt when that is to be repeated."""
        text = "".join([*self._echoes[index : index + 1], *collected.text])
        logprobs = self._logprobs(index, collected.token_ids, collected.logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, **_ending(collected)}

    def _logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Json:
        if not entries:
            return None
        offset = self._offsets.get(index, 0)
        shaped, self._offsets[index] = completion_logprobs(token_ids, entries, self._tokenizer, offset=offset)
        return shaped


class ChatFormat:
    """Choices with a `message`, or a `delta` of one."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> Fields | None:
        """Whose message it is."""
        delta: Fields = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, delta: ChoiceDelta) -> Fields:
        """New text of the message."""
        content: Fields = {"content": delta.text} if delta.text else {}
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        return {"index": delta.choice_index, "delta": content, "logprobs": logprobs, **_ending(delta)}

    def whole(self, index: int, collected: Collected) -> Fields:
        """The message."""
        message: Fields = {"role": "assistant", "content": "".join(collected.text), "refusal": None}
        logprobs = self._logprobs(collected.token_ids, collected.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, **_ending(collected)}

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Json:
        return chat_logprobs(token_ids, entries, self._tokenizer) if entries else None


def _ending(choice: ChoiceDelta | Collected) -> Fields:
    return {
        "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
        "stop_reason": choice.stop_reason,
    }


class Response:
    """One response being written, in chunks or whole."""

    def __init__(self, job: Job, choices: ChoiceFormat) -> None:
        self._job = job
        self._format = choices
        self._num_choices = sum(generation.sampling.n for generation in job.generations)
        #: Of every event, up to its choice.
        self._head = b'data: %b,"choices":[' % to_json(self._envelope(choices.chunk_object))[:-1]

    @property
    def continuous_usage(self) -> bool:
        """Whether each event tells the usage so far."""
        return self._job.continuous_usage

    def opening(self) -> bytes:
        """The events before any token."""
        openings = map(self._format.opening, range(self._num_choices))
        return b"".join(self._event(opening, None) for opening in openings if opening is not None)

    def events(self, deltas: Sequence[ChoiceDelta], usage: TokenUsage | None) -> bytes:
        """An event for each choice that gained something to show; text that is held back shows nothing."""
        return b"".join(
            [
                self._event(self._format.part(delta), usage)
                for delta in deltas
                if delta.text or delta.logprobs or delta.finish_reason
            ]
        )

    def closing(self, usage: TokenUsage) -> bytes:
        """The event after all tokens, when usage was asked for."""
        return self._event(None, usage) if self._job.include_usage else b""

    def whole(self, collected: Sequence[Collected], usage: TokenUsage) -> Fields:
        """The response that is not streamed."""
        choices: list[Json] = [self._format.whole(index, choice) for index, choice in enumerate(collected)]
        return {**self._envelope(self._format.whole_object), "choices": choices, "usage": _usage(usage)}

    def new_collection(self) -> list[Collected]:
        """An empty choice for each one asked for."""
        return [Collected() for _ in range(self._num_choices)]

    def _event(self, choice: Fields | None, usage: TokenUsage | None) -> bytes:
        """What differs between the events of a response is its choice, and its usage if that was asked for."""
        shown = b"" if choice is None else to_json(choice)
        if not self._job.include_usage:
            return b"%b%b]}\n\n" % (self._head, shown)
        # OpenAI has the field in every chunk once it was asked for, and a value in the last.
        return b'%b%b],"usage":%b}\n\n' % (self._head, shown, to_json(None if usage is None else _usage(usage)))

    def _envelope(self, object_name: str) -> Fields:
        return {
            "id": self._job.response_id,
            "object": object_name,
            "created": self._job.created,
            "model": self._job.model,
            "system_fingerprint": _FINGERPRINT,
        }


def _usage(usage: TokenUsage) -> Fields:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
