"""The format of answers: lines of JSON, or one object.

A client may split lines wherever Unicode has a line break, as Ollama's own does. So no line contains such a character.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pdserve.base.errors import PdserveError
from pdserve.base.sampling import FinishReason
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.json_pieces import to_json
from router_svc.api.ollama.content import ContentReader, Piece
from router_svc.api.ollama.errors import error_body
from router_svc.api.ollama.timing import Timing
from router_svc.api.openai.answers import TokenLogprob
from router_svc.api.openai.choices import CollectedChoice
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.logprobs import entry_pieces, logprob_entries
from router_svc.api.openai.read_message import ReadMessage, call_id
from router_svc.api.openai.shapes import in_slices
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage

#: Tokens of a whole answer that are read at once.
_TOKENS_AT_ONCE = 256
_ID_CHARACTERS = 24


class _TimedChoice(CollectedChoice):
    """The whole output, whose first token is noted."""

    def __init__(self, timing: Timing) -> None:
        super().__init__()
        self._timing = timing

    def add(self, delta: ChoiceDelta) -> None:
        """Adds new output."""
        self._timing.note_output()
        super().add(delta)


class OllamaFormatter:
    """Formats one answer."""

    content_type = "application/x-ndjson"
    continuous_usage = False
    #: Every line is an object with content, so that nothing can be sent in between.
    comment = b""

    def __init__(
        self, request: GenerationRequest, timing: Timing, shape: Callable[[Piece], bytes], tokenizer: Tokenizer
    ) -> None:
        """`shape`: the member of an object that has the content."""
        self._tokenizer = tokenizer
        self._request = request
        self._timing = timing
        self._shape = shape
        self._head = b'{"model":%b,"created_at":' % to_json(request.model)
        self._reason: FinishReason | None = None
        reading = request.reading
        self._message = ReadMessage(reading)
        characters = _ID_CHARACTERS if reading is None else reading.form.id_characters
        self._content = ContentReader(
            lambda call: call_id(request.response_id, 0, call, characters=characters),
            shows_thinking=reading is not None and reading.shows_thinking,
        )

    async def opening(self, usage: TokenUsage, /) -> bytes:
        """Nothing: the first line has the first text."""
        return b""

    async def events(self, deltas: Sequence[ChoiceDelta], usage: TokenUsage | None) -> bytes:
        """A line for what is complete of the new output."""
        self._timing.note_output()
        piece, logprobs = Piece(), list[TokenLogprob]()
        for delta in deltas:
            if delta.logprobs:
                logprobs += logprob_entries(delta.token_ids, delta.logprobs, self._tokenizer)
            is_end = delta.finish_reason is not None
            pieces = delta.pieces or (delta.text,)
            piece.add(self._content.push(self._message.add(pieces, is_end=is_end, has_tokens=bool(delta.token_ids))))
            if is_end:
                piece.add(self._content.finish())
                self._reason = delta.finish_reason
        if piece.is_empty and not logprobs:
            return b""
        shown = b'"logprobs":%b,' % to_json(logprobs) if logprobs else b""
        return _line(self._object(piece, shown + b'"done":false'))

    async def closing(self, usage: TokenUsage) -> bytes:
        """The last line."""
        return _line(self._object(Piece(), self._end(usage)))

    def failed(self, error: PdserveError) -> bytes:
        """The error as the last line."""
        return _line(to_json(error_body(error)))

    def new_collection(self) -> list[CollectedChoice]:
        """The answer, which is empty."""
        return [_TimedChoice(self._timing)]

    async def whole(self, collected: Sequence[CollectedChoice], usage: TokenUsage) -> bytes:
        """The whole answer."""
        return await in_slices(self._whole(collected[0], usage))

    def _whole(self, collected: CollectedChoice, usage: TokenUsage) -> Iterator[bytes]:
        piece = Piece()
        for start in range(0, len(collected.text), _TOKENS_AT_ONCE):
            pieces = collected.text[start : start + _TOKENS_AT_ONCE]
            piece.add(self._content.push(self._message.add(pieces, is_end=False)))
            yield b""
        piece.add(self._content.push(self._message.add((), is_end=True)))
        piece.add(self._content.finish())
        self._reason = collected.finish_reason
        end = self._end(usage)
        if not collected.logprobs:
            yield self._object(piece, end)
            return
        yield self._object(piece, b'"logprobs":')[:-1]
        yield from entry_pieces(collected.token_ids, collected.logprobs, self._tokenizer)
        yield b",%b}" % end

    def _object(self, piece: Piece, end: bytes) -> bytes:
        return b"%b%b,%b,%b}" % (self._head, to_json(self._timing.created_at()), self._shape(piece), end)

    def _end(self, usage: TokenUsage) -> bytes:
        """How the answer has ended. The model is loaded before any request comes."""
        total, to_first, since_first = self._timing.durations()
        return to_json(
            {
                "done": True,
                "done_reason": "length" if self._reason is FinishReason.LENGTH else "stop",
                "total_duration": total,
                "load_duration": 0,
                "prompt_eval_count": usage.prompt_tokens,
                "prompt_eval_duration": to_first,
                "eval_count": usage.completion_tokens,
                "eval_duration": since_first,
            }
        )[1:-1]


def _line(text: bytes) -> bytes:
    # Between the tokens of arguments, which are as the model has written them, there may be line ends.
    return text.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"
