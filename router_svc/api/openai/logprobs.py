"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.sampling import TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.records.record import Json

#: OpenAI and vLLM write this for minus infinity, which JSON does not have.
_LOWEST = -9999.0


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> Json:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`."""
    return {
        "content": [
            {
                **_token(token_id, entry.logprob, tokenizer),
                "top_logprobs": [
                    _token(top_id, logprob, tokenizer)
                    for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            }
            for token_id, entry in zip(token_ids, entries, strict=True)
        ],
        "refusal": None,
    }


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, *, offset: int
) -> tuple[Json, int]:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, and the offset of the next token.

    Offsets count the characters of earlier tokens. A character split over several tokens counts in each of them.
    """
    tokens, offsets = [], []
    for token_id in token_ids:
        text = _text(token_id, tokenizer)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    shaped: Json = {
        "tokens": [*tokens],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(token_id, entry, tokenizer) for token_id, entry in zip(token_ids, entries, strict=True)],
        "text_offset": [*offsets],
    }
    return shaped, offset


def _top(token_id: int, entry: TokenLogprobs, tokenizer: Tokenizer) -> Json:
    """The most likely tokens, and always the sampled one."""
    top: dict[str, Json] = {}
    for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        # Two tokens can have the same text, such as incomplete characters: the likelier one stays.
        top.setdefault(_text(top_id, tokenizer), _finite(logprob))
    top.setdefault(_text(token_id, tokenizer), _finite(entry.logprob))
    return top


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Json]:
    return {
        "token": _text(token_id, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
