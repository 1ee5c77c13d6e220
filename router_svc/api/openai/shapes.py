"""The format of responses, streamed and whole. Completions and chats differ only in the contents of a choice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pdserve
from pdserve.base.sampling import FinishReason, TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.event_ids import EventIds
from router_svc.api.json_pieces import text_to_json, to_json
from router_svc.api.openai.answers import (
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageAnswer,
    CompletionChunkChoice,
    CompletionLogprobs,
    Ending,
    Usage,
)
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.logprobs import (
    chat_logprobs,
    chat_logprobs_pieces,
    completion_logprobs,
    completion_logprobs_pieces,
)
from router_svc.records.record import Json
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage

#: The last event of a response.
DONE = b"data: [DONE]\n\n"
_FINGERPRINT = f"pdserve-{pdserve.__version__}"

Fields = dict[str, Json]
ChunkChoice = CompletionChunkChoice | ChatChunkChoice

#: Deltas without log-probabilities that are formatted at once.
_FEW_DELTAS = 64
#: Time on the event loop after which `in_slices` lets other callbacks run.
_SLICE_S = 0.002


async def in_slices(pieces: Iterable[bytes]) -> bytes:
    """All pieces joined. Making them does not hold the event loop longer than one piece takes, or 2 ms."""
    now = asyncio.get_running_loop().time
    joined, since = [], now()
    for piece in pieces:
        joined.append(piece)
        if now() - since > _SLICE_S:
            await asyncio.sleep(0)
            since = now()
    return b"".join(joined)


@dataclass(slots=True)
class CollectedChoice:
    """The whole output of one choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Adds new output."""
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class ChoiceFormat(Protocol):
    """The contents of an endpoint's choices."""

    chunk_object: str
    whole_object: str

    def opening(self, index: int) -> ChunkChoice | None:
        """The event of a choice before its first token, if any."""

    def chunk(self, delta: ChoiceDelta) -> ChunkChoice:
        """The choice in one chunk. Call it in order: formats may keep offsets."""

    def whole(self, index: int, collected: CollectedChoice) -> Iterator[bytes]:
        """The complete choice as JSON, in pieces that are little work each."""


class CompletionFormat:
    """Choices with `text`."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        choices_per_prompt = request.generations[0].sampling.n
        self._echoes = [echo for echo in request.echoes for _ in range(choices_per_prompt)]
        #: Characters of the tokens of each choice so far.
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> CompletionChunkChoice | None:
        """The prompt, if the client requested an echo."""
        if not self._echoes:
            return None
        return {"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None}

    def chunk(self, delta: ChoiceDelta) -> CompletionChunkChoice:
        """New text."""
        index = delta.choice_index
        logprobs = self._logprobs(index, delta.token_ids, delta.logprobs)
        return {"index": index, "text": delta.text, "logprobs": logprobs, **_ending(delta)}

    def whole(self, index: int, collected: CollectedChoice) -> Iterator[bytes]:
        """The whole text, after the prompt if the client requested an echo."""
        text = "".join([*self._echoes[index : index + 1], *collected.text])
        yield b'{"index":%d,"text":%b,"logprobs":' % (index, text_to_json(text))
        if collected.logprobs:
            yield from completion_logprobs_pieces(collected.token_ids, collected.logprobs, self._tokenizer)
        else:
            yield b"null"
        yield b"," + to_json(_ending(collected))[1:]

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
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

    def opening(self, index: int) -> ChatChunkChoice | None:
        """The role of the message."""
        delta: ChatDelta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: ChoiceDelta) -> ChatChunkChoice:
        """New text of the message."""
        content: ChatDelta = {"content": delta.text} if delta.text else {}
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        return {"index": delta.choice_index, "delta": content, "logprobs": logprobs, **_ending(delta)}

    def whole(self, index: int, collected: CollectedChoice) -> Iterator[bytes]:
        """The message."""
        message: ChatMessageAnswer = {"role": "assistant", "content": "".join(collected.text), "refusal": None}
        yield b'{"index":%d,"message":%b,"logprobs":' % (index, to_json(message))
        if collected.logprobs:
            yield from chat_logprobs_pieces(collected.token_ids, collected.logprobs, self._tokenizer)
        else:
            yield b"null"
        yield b"," + to_json(_ending(collected))[1:]

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(token_ids, entries, self._tokenizer) if entries else None


def _ending(choice: ChoiceDelta | CollectedChoice) -> Ending:
    return {
        "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
        "stop_reason": choice.stop_reason,
    }


_COMMENT = b": the next token is awaited"


class ResponseFormatter:
    """Formats one response, in chunks or whole."""

    def __init__(self, request: GenerationRequest, choices: ChoiceFormat, ids: EventIds | None = None) -> None:
        """`ids` of the events, some of which the client may have; None: events have no ids."""
        self._request = request
        self._format = choices
        self._ids = ids
        #: Start of every event, up to its choice.
        self._head = b'data: %b,"choices":[' % to_json(self._envelope(choices.chunk_object))[:-1]

    @property
    def continuous_usage(self) -> bool:
        """Whether every event has the usage so far."""
        return self._request.continuous_usage

    @property
    def comment(self) -> bytes:
        """A comment of server-sent events, which keeps a connection open.

        Where events have ids it ends without an empty line, with which openai's client and others that keep the last id
        would take it for an event without data.
        """
        return _COMMENT + (b"\n\n" if self._ids is None else b"\n")

    async def opening(self) -> bytes:
        """The events before any token."""
        return await in_slices(map(self._opening, range(self._request.num_choices)))

    def _opening(self, index: int) -> bytes:
        opening = self._format.opening(index)
        if opening is None:
            return b""
        return self._numbered(None if self._ids is None else self._ids.opening(index), self._event(opening, None))

    async def events(self, deltas: Sequence[ChoiceDelta], usage: TokenUsage | None) -> bytes:
        """An event for each delta with visible output. Text that is held back gives no event."""
        events = (self._of_delta(delta, usage) for delta in deltas)
        # A few tokens without log-probabilities, as nearly all steps have, are not worth looking at the clock.
        if len(deltas) <= _FEW_DELTAS and not deltas[0].logprobs:
            return b"".join(events)
        return await in_slices(events)

    def _of_delta(self, delta: ChoiceDelta, usage: TokenUsage | None) -> bytes:
        event_id = None if self._ids is None else self._ids.after(delta)
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return b""
        # Also of an event that the client has: formats may keep offsets.
        return self._numbered(event_id, self._event(self._format.chunk(delta), usage))

    def _numbered(self, event_id: str | None, event: bytes) -> bytes:
        """The event with its id; nothing, where events have ids and this one has none because the client has it."""
        if self._ids is None:
            return event
        return b"" if event_id is None else b"id: %b\n%b" % (event_id.encode(), event)

    def closing(self, usage: TokenUsage) -> bytes:
        """The events after all tokens: the usage, if the client requested it, and the end."""
        ids = self._ids
        last = self._numbered(None if ids is None else ids.done(), DONE)
        if not self._request.include_usage:
            return last
        return self._numbered(None if ids is None else ids.usage(), self._event(None, usage)) + last

    async def whole(self, collected: Sequence[CollectedChoice], usage: TokenUsage) -> bytes:
        """The whole response."""
        return await in_slices(self._whole(collected, usage))

    def _whole(self, collected: Sequence[CollectedChoice], usage: TokenUsage) -> Iterator[bytes]:
        yield to_json(self._envelope(self._format.whole_object))[:-1] + b',"choices":['
        for index, choice in enumerate(collected):
            if index:
                yield b","
            yield from self._format.whole(index, choice)
        yield b'],"usage":%b}' % to_json(_usage(usage))

    def new_collection(self) -> list[CollectedChoice]:
        """An empty choice for each choice of the response."""
        return [CollectedChoice() for _ in range(self._request.num_choices)]

    def _event(self, choice: ChunkChoice | None, usage: TokenUsage | None) -> bytes:
        """One event. Only the choice differs between the events of a response, and the usage if it was requested."""
        shown = b"" if choice is None else to_json(choice)
        if not self._request.include_usage:
            return b"%b%b]}\n\n" % (self._head, shown)
        # If usage was requested, OpenAI sends the field in every chunk, and a value in the last one.
        return b'%b%b],"usage":%b}\n\n' % (self._head, shown, to_json(None if usage is None else _usage(usage)))

    def _envelope(self, object_name: str) -> Fields:
        return {
            "id": self._request.response_id,
            "object": object_name,
            "created": self._request.created,
            "model": self._request.model,
            "system_fingerprint": _FINGERPRINT,
        }


def _usage(usage: TokenUsage) -> Usage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
