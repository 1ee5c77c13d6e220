"""Log-probabilities in OpenAI's two formats, for chunks and, in pieces, for whole responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.base.sampling import TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

#: OpenAI and vLLM write this for minus infinity, which JSON does not have.
_LOWEST = -9999.0
#: Entries of one piece of a whole response. Shaping and encoding them takes about 2 ms.
_PIECE_ENTRIES = 256


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`."""
    return {"content": _content(token_ids, entries, tokenizer), "refusal": None}


def chat_logprobs_pieces(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> Iterator[bytes]:
    """`chat_logprobs` as JSON. Each piece is little work."""
    yield b'{"content":['
    for chunk in _chunks(entries):
        separator = b"," if chunk.start else b""
        yield separator + to_json(_content(token_ids[chunk], entries[chunk], tokenizer))[1:-1]
    yield b'],"refusal":null}'


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, *, offset: int
) -> tuple[CompletionLogprobs, int]:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, and the offset of the next token.

    Offsets count the characters of earlier tokens. A character split over several tokens counts in each of them.
    """
    tokens, offsets = [], []
    for token_id in token_ids:
        text = _text(token_id, tokenizer)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    shaped: CompletionLogprobs = {
        "tokens": [*tokens],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(token_id, entry, tokenizer) for token_id, entry in zip(token_ids, entries, strict=True)],
        "text_offset": [*offsets],
    }
    return shaped, offset


def completion_logprobs_pieces(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> Iterator[bytes]:
    """`completion_logprobs` as JSON. Each piece is little work, and some are empty."""
    lists: dict[str, list[bytes]] = {}
    offset = 0
    for chunk in _chunks(entries):
        shaped, offset = completion_logprobs(token_ids[chunk], entries[chunk], tokenizer, offset=offset)
        for name, values in shaped.items():
            lists.setdefault(name, []).append(to_json(values)[1:-1])
        yield b""
    yield b"{%b}" % b",".join(b"%b:[%b]" % (to_json(name), b",".join(pieces)) for name, pieces in lists.items())


def _chunks(entries: Sequence[TokenLogprobs]) -> Iterator[slice]:
    """Slices of tokens with about `_PIECE_ENTRIES` log-probabilities each."""
    step = max(1, _PIECE_ENTRIES // (1 + max(len(entry.top_ids) for entry in entries)))
    return (slice(start, start + step) for start in range(0, len(entries), step))


def _content(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[TokenLogprob]:
    return [
        {
            **_token(token_id, entry.logprob, tokenizer),
            "top_logprobs": [
                _token(top_id, logprob, tokenizer)
                for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def _top(token_id: int, entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The most likely tokens, and always the sampled one."""
    top: dict[str, float] = {}
    for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        # Two tokens can have the same text, such as incomplete characters: the likelier one stays.
        top.setdefault(_text(top_id, tokenizer), _finite(logprob))
    top.setdefault(_text(token_id, tokenizer), _finite(entry.logprob))
    return top


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    return {
        "token": _text(token_id, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
