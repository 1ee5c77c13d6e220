"""Log-probabilities in OpenAI's two formats, for chunks and, in pieces, for whole responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pdserve.base.sampling import TokenLogprobs
from pdserve.model.tokenizer import StreamDetokenizer, Tokenizer
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

#: OpenAI and vLLM write this for minus infinity, which JSON does not have.
_LOWEST = -9999.0
#: Entries of one piece of a whole response. Shaping and encoding them takes about 2 ms.
_PIECE_ENTRIES = 256


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`."""
    return {"content": logprob_entries(token_ids, entries, tokenizer), "refusal": None}


def chat_logprobs_pieces(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> Iterator[bytes]:
    """`chat_logprobs` as JSON. Each piece is little work."""
    yield b'{"content":'
    yield from entry_pieces(token_ids, entries, tokenizer)
    yield b',"refusal":null}'


def entry_pieces(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> Iterator[bytes]:
    """`logprob_entries` as JSON. Each piece is little work."""
    yield b"["
    for chunk in chunks_of(entries):
        separator = b"," if chunk.start else b""
        yield separator + to_json(logprob_entries(token_ids[chunk], entries[chunk], tokenizer))[1:-1]
    yield b"]"


class TextOffsets:
    """Where the tokens of an output start in the text of its choice, in characters.

    A character that is split over several tokens counts where its last one is. Tokens that the text leaves out have no
    width.
    """

    def __init__(self, detokenizer: StreamDetokenizer, start: int = 0) -> None:
        """`start`: where the output starts in the text."""
        self._detokenizer = detokenizer
        self._position = start

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        position = self._position
        self._position += len(self._detokenizer.push([token_id]))
        return position


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, offsets: TextOffsets
) -> CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of the next tokens."""
    return {
        "tokens": [text_of(token_id, tokenizer) for token_id in token_ids],
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [likeliest(*pair, tokenizer) for pair in zip(token_ids, entries, strict=True)],
        "text_offset": [*map(offsets.next, token_ids)],
    }


def completion_chunks(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, offsets: TextOffsets
) -> Iterator[CompletionLogprobs]:
    """`completion_logprobs` of some tokens after the other. Each is little work."""
    return (completion_logprobs(token_ids[chunk], entries[chunk], tokenizer, offsets) for chunk in chunks_of(entries))


def completion_logprobs_pieces(chunks: Iterable[CompletionLogprobs]) -> Iterator[bytes]:
    """All chunks together as JSON. Each piece is little work, and some are empty."""
    lists: dict[str, list[bytes]] = {name: [] for name in CompletionLogprobs.__annotations__}
    for shaped in chunks:
        for name, values in shaped.items():
            lists[name].append(to_json(values)[1:-1])
        yield b""
    yield b"{%b}" % b",".join(b"%b:[%b]" % (to_json(name), b",".join(pieces)) for name, pieces in lists.items())


def chunks_of(entries: Sequence[TokenLogprobs]) -> Iterator[slice]:
    """Slices of tokens with about `_PIECE_ENTRIES` log-probabilities each."""
    step = tokens_per_piece(entries)
    return (slice(start, start + step) for start in range(0, len(entries), step))


def tokens_per_piece(entries: Sequence[TokenLogprobs]) -> int:
    """Tokens with about `_PIECE_ENTRIES` log-probabilities."""
    return max(1, _PIECE_ENTRIES // (1 + max((len(entry.top_ids) for entry in entries), default=0)))


def logprob_entries(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[TokenLogprob]:
    """One entry per token, with its id and those of its alternatives."""
    return [
        {
            **_token(token_id, entry.logprob, tokenizer),
            "rank": entry.rank,
            "top_logprobs": [
                _token(top_id, logprob, tokenizer)
                for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def likeliest(token_id: int, entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The most likely tokens, and always the sampled one."""
    top: dict[str, float] = {}
    for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        # Two tokens can have the same text, such as incomplete characters: the likelier one stays.
        top.setdefault(text_of(top_id, tokenizer), finite(logprob))
    top.setdefault(text_of(token_id, tokenizer), finite(entry.logprob))
    return top


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    return {
        "token_id": token_id,
        "token": text_of(token_id, tokenizer),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def text_of(token_id: int, tokenizer: Tokenizer) -> str:
    """The text of one token. Bytes that are no character become U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def finite(logprob: float) -> float:
    """The log-probability as JSON can have it."""
    return max(logprob, _LOWEST)
