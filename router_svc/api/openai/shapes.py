"""The format of responses, streamed and whole. Completions and chats differ only in the contents of a choice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import pdserve
from pdserve.base.errors import PdserveError
from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import EVENTS
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.answers import (
    ChatChunkChoice,
    CompletionChunkChoice,
    Usage,
)
from router_svc.api.openai.choices import CollectedChoice
from router_svc.api.openai.errors import error_body
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.records.record_json import Json
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


class ChoiceFormat(Protocol):
    """The contents of an endpoint's choices."""

    chunk_object: str
    whole_object: str

    @property
    def counts_reasoning(self) -> bool:
        """Whether there can be tokens of thinking, so that every token has to be read."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thinking so far."""

    def opening(self, index: int) -> ChunkChoice | None:
        """The event of a choice before its first token, if any."""

    def scored(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The event of a choice that starts with the log-probabilities of its prompt, as JSON in pieces."""

    def shared_fields(self) -> Iterator[bytes]:
        """Fields of the whole response, and of the first event of a stream, as JSON with a comma before each.

        For a whole response, call it after the choices.
        """

    def chunk(self, delta: ChoiceDelta) -> ChunkChoice | None:
        """The choice in one chunk, unless all is held back. Call it in order: formats may keep offsets."""

    def whole(self, index: int, collected: CollectedChoice) -> Iterator[bytes]:
        """The complete choice as JSON, in pieces that are little work each."""


_COMMENT = b": the next token is awaited"


class ResponseFormatter:
    """Formats one response, in chunks or whole."""

    content_type = EVENTS

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

        Where events have ids, no empty line ends the comment: openai's client, and others that keep the last id, would
        take it for an event without data.
        """
        return _COMMENT + (b"\n\n" if self._ids is None else b"\n")

    async def opening(self, _: TokenUsage, /) -> bytes:
        """The events before any token."""
        return await in_slices(map(self._opening, range(self._request.num_choices)))

    def _opening(self, index: int) -> bytes:
        opening = self._format.opening(index)
        if opening is None:
            return b""
        # The first event of the response has the fields that are no choice's.
        event = self._event(opening, None, b"" if index else b"".join(self._format.shared_fields()))
        return self._numbered(None if self._ids is None else self._ids.opening(index), event)

    async def events(self, deltas: Sequence[ChoiceDelta], usage: TokenUsage | None) -> bytes:
        """An event for each delta with visible output. Text that is held back gives no event."""
        if deltas[0].prompt_logprobs is not None:
            return await in_slices(self._scored(deltas, usage))
        events = (self._of_delta(delta, usage) for delta in deltas)
        # A few tokens without log-probabilities, as nearly all steps have, are not worth looking at the clock.
        if len(deltas) <= _FEW_DELTAS and not deltas[0].logprobs:
            return b"".join(events)
        return await in_slices(events)

    def _scored(self, deltas: Sequence[ChoiceDelta], usage: TokenUsage | None) -> Iterator[bytes]:
        """The events with which choices start if they have log-probabilities of the prompt."""
        for delta in deltas:
            yield self._head
            yield from self._format.scored(delta)
            yield self._event(None, usage).removeprefix(self._head)

    def _of_delta(self, delta: ChoiceDelta, usage: TokenUsage | None) -> bytes:
        event_id = None if self._ids is None else self._ids.after(delta)
        is_read = self._format.counts_reasoning or (delta.token_ids and self._request.return_token_ids)
        if not (delta.text or delta.logprobs or delta.finish_reason or is_read):
            return b""
        # The chunk is made even if the client has the event: formats may keep offsets.
        chunk = self._format.chunk(delta)
        return b"" if chunk is None else self._numbered(event_id, self._event(chunk, usage))

    def _numbered(self, event_id: str | None, event: bytes) -> bytes:
        """The event with its id, if it has one; nothing, if the client has the event."""
        if self._ids is None or event_id == "":
            return event
        return b"" if event_id is None else b"id: %b\n%b" % (event_id.encode(), event)

    async def closing(self, usage: TokenUsage) -> bytes:
        """The events after all tokens: the usage, if the client requested it, and the end."""
        ids = self._ids
        last = self._numbered(None if ids is None else ids.done(), DONE)
        if not self._request.include_usage:
            return last
        return self._numbered(None if ids is None else ids.usage(), self._event(None, usage)) + last

    def failed(self, error: PdserveError) -> bytes:
        """The error as an event, and the end."""
        return b"data: %b\n\n" % to_json(error_body(error)) + DONE

    async def whole(self, collected: Sequence[CollectedChoice], usage: TokenUsage) -> bytes:
        """The whole response."""
        return await in_slices(self._whole(collected, usage))

    def _whole(self, collected: Sequence[CollectedChoice], usage: TokenUsage) -> Iterator[bytes]:
        yield to_json(self._envelope(self._format.whole_object))[:-1] + b',"choices":['
        for index, choice in enumerate(collected):
            if index:
                yield b","
            yield from self._format.whole(index, choice)
        yield b"]"
        yield from self._format.shared_fields()
        yield b',"usage":%b}' % to_json(self._usage(usage))

    def new_collection(self) -> list[CollectedChoice]:
        """An empty choice for each choice of the response."""
        return [CollectedChoice() for _ in range(self._request.num_choices)]

    def _event(self, choice: ChunkChoice | None, usage: TokenUsage | None, more: bytes = b"") -> bytes:
        """One event. Only the choice differs between the events of a response, and the usage if it was requested.

        `more` has further fields of the event, each behind a comma.
        """
        shown = b"" if choice is None else to_json(choice)
        if not self._request.include_usage:
            return b"%b%b]%b}\n\n" % (self._head, shown, more)
        # If usage was requested, OpenAI sends the field in every chunk, and a value in the last one.
        shown_usage = to_json(None if usage is None else self._usage(usage))
        return b'%b%b]%b,"usage":%b}\n\n' % (self._head, shown, more, shown_usage)

    def _envelope(self, object_name: str) -> Fields:
        return {
            "id": self._request.response_id,
            "object": object_name,
            "created": self._request.created,
            "model": self._request.model,
            "system_fingerprint": _FINGERPRINT,
        }

    def _usage(self, usage: TokenUsage) -> Usage:
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._format.reasoning_tokens},
        }
