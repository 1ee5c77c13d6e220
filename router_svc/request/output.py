"""Turns numbered tokens from workers into what a client sees: text, in order, once, and never past a stop string. Pure.

Two workers report tokens of the same choice: the first comes from prefill, the rest from decode, and a retry repeats
some. The index of each token decides; arrival order does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdserve.base.errors import PdserveError
from pdserve.base.sampling import ChoiceTokens, FinishReason, TokenLogprobs
from pdserve.model.tokenizer import StreamDetokenizer, Tokenizer
from router_svc.generation import Generation
from router_svc.request.stop_strings import StopScanner


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What one choice gained. `stop_reason` is the stop string or stop token that the client had asked for."""

    choice_index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Output:
    """All choices of one generation. Owned by its saga."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._choices = [_Choice(index, generation, tokenizer) for index in range(generation.sampling.n)]
        self._num_open = len(self._choices)
        #: Tokens of all choices so far.
        self.completion_tokens = 0

    def push(self, tokens: Iterable[ChoiceTokens]) -> list[ChoiceDelta]:
        """Takes tokens from any worker, in any order, repeated or not; returns what is new to the client."""
        deltas = []
        for piece in tokens:
            delta = self._choices[piece.choice_index].push(piece)
            if delta is not None:
                deltas.append(delta)
                self.completion_tokens += len(delta.token_ids)
                self._num_open -= delta.finish_reason is not None
        return deltas

    def forget_early(self) -> None:
        """Drops tokens that wait for their first one: the decode worker they came from was given up."""
        for choice in self._choices:
            choice.early.clear()

    @property
    def is_finished(self) -> bool:
        """Whether every choice is complete."""
        return not self._num_open

    @property
    def has_started(self) -> bool:
        """Whether a client may have seen a token."""
        return any(choice.token_ids for choice in self._choices)

    @property
    def has_first_tokens(self) -> bool:
        """Whether the first token of every choice is known."""
        return all(choice.token_ids for choice in self._choices)

    @property
    def is_past_first_tokens(self) -> bool:
        """Whether some choice went on after its first token: only a decode worker could have done that."""
        return any(len(choice.token_ids) > 1 for choice in self._choices)

    @property
    def first_tokens(self) -> list[int]:
        """The first token of every choice, or none when one is unknown: what a retry must begin with."""
        return [choice.token_ids[0] for choice in self._choices] if self.has_first_tokens else []

    @property
    def finish_reasons(self) -> list[str]:
        """Per choice: "stop", "length" or "unfinished"."""
        return [choice.finish_reason.value if choice.finish_reason else "unfinished" for choice in self._choices]


@dataclass(slots=True)
class _Ended:
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(slots=True)
class _Step:
    """What the tokens of one piece added up to."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: _Ended | None = None


class _Choice:
    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer) -> None:
        rules, sampling = generation.text, generation.sampling
        self._index = index
        self._detokenizer = StreamDetokenizer(tokenizer, rules.skip_special_tokens)
        self._scanner = StopScanner(rules.stop, include=rules.include_stop_str_in_output)
        self._include_stop = rules.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = sampling.stop_token_ids
        #: Tokens that arrived before the first one: decode can overtake prefill's stream.
        self.early: list[ChoiceTokens] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, piece: ChoiceTokens) -> ChoiceDelta | None:
        if self.finished:
            return None
        if piece.first_index > len(self.token_ids):
            self._hold(piece)
            return None
        step = _Step()
        self._take(piece, step)
        while self.early and step.ended is None:
            self._take(self.early.pop(0), step)
        if step.ended is not None:
            self.finish_reason = step.ended.finish_reason
        elif not step.token_ids:
            return None
        return ChoiceDelta(
            choice_index=self._index,
            text="".join(step.text),
            token_ids=tuple(step.token_ids),
            logprobs=tuple(step.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=step.ended.stop_reason if step.ended else None,
        )

    def _hold(self, piece: ChoiceTokens) -> None:
        expected = self.early[-1].first_index + len(self.early[-1].token_ids) if self.early else 1
        if self.token_ids or piece.first_index != expected:
            raise PdserveError(
                f"A worker skipped tokens: choice {self._index} has {len(self.token_ids)} tokens, "
                f"the next message starts at {piece.first_index}."
            )
        self.early.append(piece)

    def _take(self, piece: ChoiceTokens, step: _Step) -> None:
        """Adds the tokens of `piece` that are new, up to the one that completes a stop string."""
        known = len(self.token_ids) - piece.first_index
        last = len(piece.token_ids) - 1
        for position in range(known, len(piece.token_ids)):
            self.token_ids.append(piece.token_ids[position])
            step.token_ids.append(piece.token_ids[position])
            step.logprobs.extend(piece.logprobs[position : position + 1])
            # The token that ends a choice is a signal, not text.
            ends_by_token = position == last and piece.finish_reason is FinishReason.STOP
            if ends_by_token and not self._include_stop:
                break
            if self._emit(self._detokenizer.push([piece.token_ids[position]]), step):
                return
        if piece.finish_reason is not None and not self._emit(self._detokenizer.finish(), step):
            step.text.append(self._scanner.flush())
            step.ended = _Ended(piece.finish_reason, self._asked_for(piece.stop_token_id))

    def _emit(self, text: str, step: _Step) -> bool:
        """Adds text; True when it completed a stop string, which then ended the choice."""
        if len(self.token_ids) <= self._min_tokens:
            step.text.append(text)
            return False
        scanned = self._scanner.push(text)
        step.text.append(scanned.text)
        if scanned.matched is None:
            return False
        step.ended = _Ended(FinishReason.STOP, scanned.matched)
        return True

    def _asked_for(self, stop_token_id: int | None) -> int | None:
        return stop_token_id if stop_token_id in self._stop_token_ids else None


def ended_by_stop_string(deltas: Sequence[ChoiceDelta]) -> list[int]:
    """The choices that these deltas ended without their worker knowing it."""
    return [delta.choice_index for delta in deltas if isinstance(delta.stop_reason, str)]
