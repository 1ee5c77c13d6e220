"""The format of a response: events with numbers, or the whole object."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pdserve.base.errors import Cancelled, PdserveError, codes_of
from pdserve.base.sampling import FinishReason, TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import EVENTS
from router_svc.api.openai.choices import CollectedChoice
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.logprobs import chat_logprobs, tokens_per_piece
from router_svc.api.openai.read_message import ReadMessage
from router_svc.api.openai.shapes import in_slices
from router_svc.api.responses.encoding import Encoded, event_pieces, pieces_of
from router_svc.api.responses.output import ResponseOutput, Shown
from router_svc.api.responses.tools import Names
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage
from router_svc.state.response_record import ShownResponse

#: Tokens of a whole response that are read at once.
_TOKENS_AT_ONCE = 256
#: Characters of the ids of calls where the model does not read messages by a form.
_ID_CHARACTERS = 32


class ResponsesFormatter:
    """Formats one response."""

    content_type = EVENTS
    continuous_usage = False

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        ids: EventIds | None = None,
        keep: Callable[[ShownResponse], Awaitable[bool]] | None = None,
    ) -> None:
        """`ids` of the events, some of which the client may have; None: events have no ids.

        `keep` stores the complete response before the client has it, and returns whether it is stored.
        """
        self._keep = keep
        #: The response as it was when it ended.
        self.response: ShownResponse | None = None
        self._request = request
        self._tokenizer = tokenizer
        self._ids = ids
        fields: Mapping[str, Any] = json.loads(request.request_fields)
        self._repeated: Mapping[str, Any] = fields["repeated"]
        self._has_logprobs: bool = fields["has_logprobs"]
        self._message = ReadMessage(request.reading)
        self._output = ResponseOutput(
            request.response_id,
            Names.from_record(fields["names"]),
            encodes_thinking=fields["encodes_thinking"],
            id_characters=_ID_CHARACTERS if request.reading is None else request.reading.form.id_characters,
        )
        self._number = 0
        self._finish: FinishReason | None = None

    @property
    def comment(self) -> bytes:
        """A comment of server-sent events, which keeps a connection open."""
        return b": the next token is awaited" + (b"\n\n" if self._ids is None else b"\n")

    @property
    def num_events(self) -> int:
        """Events so far."""
        return self._number

    async def opening(self, _: TokenUsage, /) -> bytes:
        """The response without output, twice: made, and running."""
        snapshot = Encoded(self.start("in_progress").body)
        shown = [{"type": f"response.{kind}", "response": snapshot} for kind in ("created", "in_progress")]
        return self._events(None if self._ids is None else self._ids.opening(0), shown)

    async def events(self, deltas: Sequence[ChoiceDelta], usage: TokenUsage | None) -> bytes:
        """The events of new output. Text that is held back gives none."""
        return await in_slices(piece for delta in deltas for piece in self._of_delta(delta))

    async def closing(self, usage: TokenUsage) -> bytes:
        """The whole response."""
        response = await self._ended(usage)
        event = {"type": f"response.{response.status}", "response": Encoded(response.body)}
        return self._events(None if self._ids is None else self._ids.done(), [event])

    async def _ended(self, usage: TokenUsage | None) -> ShownResponse:
        snapshot = self._snapshot(self._status(), usage)
        self.response = await self._shown(snapshot)
        if self._keep is not None and not await self._keep(self.response):
            self.response = await self._shown(snapshot | {"store": False})
        return self.response

    def start(self, status: str) -> ShownResponse:
        """The response before it has any output."""
        snapshot = self._snapshot(status, None)
        return self._encoded(snapshot, pieces_of(snapshot))

    def failed_at_end(self, error: PdserveError) -> bytes:
        """The last event instead of that of `closing`, which no client has: the response has failed, without output."""
        self._number -= 1
        self._output.drop()
        return self.failed(error)

    def failed(self, error: PdserveError) -> bytes:
        """The response as far as it came, with the error."""
        self._output.abandon()
        is_cancelled = isinstance(error, Cancelled)
        # OpenAI's API has no event of its own for what is cancelled.
        status, kind = ("cancelled", "incomplete") if is_cancelled else ("failed", "failed")
        snapshot = self._snapshot(status, None) | {"error": None if is_cancelled else error_of(error)}
        if self._keep is not None:
            snapshot["store"] = False
        self.response = self._encoded(snapshot, pieces_of(snapshot))
        return self._events("", [{"type": f"response.{kind}", "response": Encoded(self.response.body)}])

    async def _shown(self, snapshot: Mapping[str, Any]) -> ShownResponse:
        return self._encoded(snapshot, [await in_slices(pieces_of(snapshot))])

    def _encoded(self, snapshot: Mapping[str, Any], pieces: Iterable[bytes]) -> ShownResponse:
        body = b"".join(pieces)
        return ShownResponse(id=snapshot["id"], status=snapshot["status"], body=body, output=self._output.said())

    def new_collection(self) -> list[CollectedChoice]:
        """One choice."""
        return [CollectedChoice()]

    async def whole(self, collected: Sequence[CollectedChoice], usage: TokenUsage) -> bytes:
        """The whole response."""
        await in_slices(self._collected(collected[0]))
        return (await self._ended(usage)).body

    def _collected(self, choice: CollectedChoice) -> Iterator[bytes]:
        step = tokens_per_piece(choice.logprobs) if choice.logprobs else _TOKENS_AT_ONCE
        for start in range(0, max(len(choice.text), 1), step):
            tokens = slice(start, start + step)
            is_end = tokens.stop >= len(choice.text)
            self._read(choice.text[tokens], choice.token_ids[tokens], choice.logprobs[tokens], is_end=is_end)
            yield b""
        self._end(choice.finish_reason)

    def _read(
        self,
        pieces: Sequence[str],
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        *,
        is_end: bool,
    ) -> list[Shown]:
        has_tokens = bool(token_ids)
        if not logprobs:
            return list(self._output.add(self._message.add(pieces, is_end=is_end, has_tokens=has_tokens), []))
        shown: list[Shown] = []
        entries = chat_logprobs(token_ids, logprobs, self._tokenizer)["content"]
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            # The end of a text that was held back may come without tokens of its own.
            own = entries[index:] if is_last else entries[index : index + 1]
            shown += self._output.add(self._message.add((piece,), is_end=is_end and is_last), own)
        return shown

    def _end(self, finish_reason: FinishReason | None) -> list[Shown]:
        self._finish = finish_reason
        return list(self._output.finish(is_complete=self._status() == "completed"))

    def _of_delta(self, delta: ChoiceDelta) -> Iterator[bytes]:
        is_end = delta.finish_reason is not None
        shown = self._read(delta.pieces or (delta.text,), delta.token_ids, delta.logprobs, is_end=is_end)
        if is_end:
            shown += self._end(delta.finish_reason)
        return self._pieces("" if self._ids is None else self._ids.after(delta), shown)

    def _events(self, event_id: str | None, shown: Sequence[Shown]) -> bytes:
        return b"".join(self._pieces(event_id, shown))

    def _pieces(self, event_id: str | None, shown: Sequence[Shown]) -> Iterator[bytes]:
        """Numbered events. The last one has the id, which covers all of them; None: the client has them."""
        first, self._number = self._number, self._number + len(shown)
        if event_id is None and self._ids is not None:
            return
        for number, event in enumerate(shown, first):
            if event_id and number == self._number - 1:
                yield b"id: %b\n" % event_id.encode()
            yield from event_pieces(event, number)

    def _status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _snapshot(self, status: str, usage: TokenUsage | None) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            "id": self._request.response_id,
            "object": "response",
            "created_at": self._request.created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._request.model,
            "output": self._output.items(),
            "usage": None if usage is None else self._usage(usage),
            "service_tier": "default",
            **self._repeated,
        }

    def _usage(self, usage: TokenUsage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._message.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def last_event(number: int, response: ShownResponse) -> bytes:
    """The last event of a response that has ended."""
    kind = response.status if response.status in ("completed", "failed") else "incomplete"
    return b"".join(event_pieces({"type": f"response.{kind}", "response": Encoded(response.body)}, number))


def error_of(error: PdserveError) -> dict[str, Any]:
    """The error of a response that has failed. Its codes are OpenAI's, which has few."""
    codes = codes_of(error)
    code = "rate_limit_exceeded" if codes.http == 429 else "invalid_prompt" if codes.http < 500 else "server_error"
    return {"code": code, "message": str(error)}
