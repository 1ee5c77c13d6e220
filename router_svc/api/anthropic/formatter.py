"""The format of messages, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdserve.base.errors import PdserveError
from pdserve.base.sampling import FinishReason
from router_svc.api.anthropic.answers import (
    Ends,
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageUsage,
    StopReason,
)
from router_svc.api.anthropic.content import ContentRules, ContentWriter, WholeContent
from router_svc.api.anthropic.conversation import CALL_PREFIX
from router_svc.api.anthropic.errors import error_body
from router_svc.api.anthropic.signatures import Signer
from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import EVENTS
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.choices import CollectedChoice
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.read_message import ReadMessage, call_digest
from router_svc.api.openai.shapes import in_slices
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage

ID_PREFIX = "msg_"
#: Tokens of a whole message that are read at once.
_TOKENS_AT_ONCE = 256
_ID_CHARACTERS = 24
_NO_END: Ends = {"stop_reason": None, "stop_sequence": None}


def request_fields(*, omits_thinking: bool, length_reason: StopReason) -> str:
    """What the response has of its request besides its tokens, as JSON. `length_reason`: why it ends by its length."""
    return json.dumps({"omits_thinking": omits_thinking, "length_reason": length_reason})


class MessageFormatter:
    """Formats one message."""

    content_type = EVENTS
    continuous_usage = False
    comment = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, request: GenerationRequest, signer: Signer, ids: EventIds | None = None) -> None:
        """`ids` of the events, some of which the client may have; None: events have no ids."""
        self._request = request
        self._ids = ids
        self._ends = _NO_END
        reading, fields = request.reading, json.loads(request.request_fields)
        self._length_reason: StopReason = fields["length_reason"]
        self._message = ReadMessage(reading)
        self._counts_thinking = reading is not None and reading.thinks
        characters = _ID_CHARACTERS if reading is None else reading.form.id_characters
        self._content = ContentWriter(
            ContentRules(
                signer=signer,
                call_id=lambda call: CALL_PREFIX + call_digest(request.response_id, 0, call)[:characters],
                shows_thinking=reading is not None and reading.shows_thinking,
                omits_thinking=fields["omits_thinking"],
            )
        )

    async def opening(self, usage: TokenUsage, /) -> bytes:
        """The start of the message."""
        answer = self._answer(_NO_END, replace(usage, completion_tokens=0))
        start: MessageStart = {"type": "message_start", "message": answer}
        return self._numbered([start], None if self._ids is None else self._ids.opening(0))

    async def events(self, deltas: Sequence[ChoiceDelta], usage: TokenUsage | None) -> bytes:
        """The events of blocks. Those of one delta belong together: the last one has the id."""
        return b"".join(map(self._of_delta, deltas))

    def _of_delta(self, delta: ChoiceDelta) -> bytes:
        event_id = None if self._ids is None else self._ids.after(delta)
        is_end = delta.finish_reason is not None
        pieces = delta.pieces or (delta.text,)
        read = self._message.add(pieces, is_end=is_end, has_tokens=bool(delta.token_ids))
        made = self._content.push(read)
        if is_end:
            made += self._content.finish()
            self._ends = self._ending(delta)
        return self._numbered(made, event_id) if made else b""

    async def closing(self, usage: TokenUsage) -> bytes:
        """How the message has ended, and the last event."""
        ids = self._ids
        ends: MessageDelta = {"type": "message_delta", "delta": self._ends, "usage": self._usage(usage)}
        last = self._numbered([ends], None if ids is None else ids.usage())
        return last + self._numbered([{"type": "message_stop"}], None if ids is None else ids.done())

    def failed(self, error: PdserveError) -> bytes:
        """The error as the last event."""
        body = error_body(error, self._request.response_id.removeprefix(ID_PREFIX))
        return b"event: error\ndata: %b\n\n" % to_json(body)

    def new_collection(self) -> list[CollectedChoice]:
        """The message, which is empty."""
        return [CollectedChoice()]

    async def whole(self, collected: Sequence[CollectedChoice], usage: TokenUsage) -> bytes:
        """The whole message."""
        return await in_slices(self._whole(collected[0], usage))

    def _whole(self, collected: CollectedChoice, usage: TokenUsage) -> Iterator[bytes]:
        content = WholeContent()
        for start in range(0, len(collected.text), _TOKENS_AT_ONCE):
            content.add(
                self._content.push(self._message.add(collected.text[start : start + _TOKENS_AT_ONCE], is_end=False))
            )
            yield b""
        content.add(self._content.push(self._message.add((), is_end=True)))
        content.add(self._content.finish())
        self._ends = self._ending(collected)
        head, _, tail = to_json(self._answer(self._ends, usage)).partition(b'"content":[]')
        yield head + b'"content":'
        yield from content.to_json()
        yield tail

    def _ending(self, choice: ChoiceDelta | CollectedChoice) -> Ends:
        """Why the message has ended: a text of the client comes first, then the length, then calls."""
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        if choice.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": self._length_reason, "stop_sequence": None}
        return {"stop_reason": "tool_use" if self._message.calls else "end_turn", "stop_sequence": None}

    def _answer(self, ends: Ends, usage: TokenUsage) -> MessageAnswer:
        return {
            "id": self._request.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            **ends,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: TokenUsage) -> MessageUsage:
        shown: MessageUsage = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            # Blocks are cached by themselves, and writing them costs nothing.
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if self._counts_thinking:
            shown["output_tokens_details"] = {"thinking_tokens": self._message.reasoning_tokens}
        return shown

    def _numbered(self, events: Sequence[MessageEvent], event_id: str | None) -> bytes:
        """The events, the last one with the id if it has one; nothing, if the client has them."""
        if self._ids is not None and event_id is None:
            return b""
        shown = [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event)) for event in events]
        if event_id:
            shown[-1] = b"id: %b\n%b" % (event_id.encode(), shown[-1])
        return b"".join(shown)
