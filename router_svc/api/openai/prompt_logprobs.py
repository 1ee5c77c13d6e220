"""Log-probabilities of prompts: OpenAI's, with which the choices of an echo start, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pdserve.base.sampling import TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.answers import CompletionLogprobs, PromptTokenLogprob
from router_svc.api.openai.logprobs import chunks_of, finite, likeliest, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt that is repeated in front of an output, and what is reported of its tokens."""

    token_ids: Sequence[int]
    #: As the choice shows it.
    text: str
    #: Scores of the tokens behind the first one.
    scores: Sequence[TokenLogprobs]
    #: Likeliest tokens to show, which are the first ones of each entry of `scores`.
    alternatives: int
    #: Tokens to show wherever they are in an entry.
    listed: Collection[int] = ()

    def chunks(self, tokenizer: Tokenizer) -> Iterator[CompletionLogprobs]:
        """The log-probabilities of some tokens after the other. Each is little work."""
        offsets = _Offsets(self.text, tokenizer)
        yield {
            "tokens": [text_of(self.token_ids[0], tokenizer)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [offsets.next(self.token_ids[0])],
        }
        token_ids = self.token_ids[1:]
        for chunk in chunks_of(self.scores):
            pairs = [*zip(token_ids[chunk], map(self._shown, self.scores[chunk]), strict=True)]
            yield {
                "tokens": [text_of(token_id, tokenizer) for token_id, _ in pairs],
                "token_logprobs": [finite(entry.logprob) for _, entry in pairs],
                "top_logprobs": [likeliest(token_id, entry, tokenizer) for token_id, entry in pairs],
                "text_offset": [offsets.next(token_id) for token_id, _ in pairs],
            }

    def _shown(self, entry: TokenLogprobs) -> TokenLogprobs:
        if len(entry.top_ids) <= self.alternatives:
            return entry
        pairs = [*zip(entry.top_ids, entry.top_logprobs, strict=True)]
        kept = pairs[: self.alternatives] + [pair for pair in pairs[self.alternatives :] if pair[0] in self.listed]
        return replace(
            entry, top_ids=tuple(token for token, _ in kept), top_logprobs=tuple(logprob for _, logprob in kept)
        )


class _Offsets:
    """Where the tokens of a prompt are in its text. A token that the text does not show has no width there.

    The text does not show tokens that the tokenizer adds. A character that is split over several tokens counts where
    its last one is.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._position = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, token_id: int) -> int:
        """The offset of the next token, in characters."""
        position = self._position
        whole = self._characters.decode(self._tokenizer.token_bytes(token_id))
        # Some tokenizers put a space in front of a text, which has none there.
        for shown in (whole, whole.removeprefix(" ")):
            if self._text.startswith(shown, position):
                self._position += len(shown)
                break
        return position


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """A prompt of which vLLM's field `prompt_logprobs` reports the tokens."""

    token_ids: Sequence[int]
    #: Likeliest tokens to show, which are the first ones of each score.
    alternatives: int

    def pieces(self, scores: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> Iterator[bytes]:
        """The field as JSON: null, then for each token the likeliest ones and itself, by their ids.

        `scores` are those of the tokens behind the first one. Each piece is little work.
        """
        yield b"[null"
        token_ids = self.token_ids[1:]
        for chunk in chunks_of(scores):
            pairs = zip(token_ids[chunk], scores[chunk], strict=True)
            shaped = [_by_id(token_id, entry, self.alternatives, tokenizer) for token_id, entry in pairs]
            yield b"," + to_json(shaped)[1:-1]
        yield b"]"


def _by_id(
    token_id: int, entry: TokenLogprobs, alternatives: int, tokenizer: Tokenizer
) -> dict[str, PromptTokenLogprob]:
    ranked = zip(entry.top_ids[:alternatives], entry.top_logprobs[:alternatives], strict=True)
    shown = [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(ranked, 1)]
    if token_id not in entry.top_ids[:alternatives]:
        shown.append((token_id, entry.logprob, entry.rank))
    return {
        str(each): {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of(each, tokenizer)}
        for each, logprob, rank in shown
    }
