"""Turns numbered tokens from workers into text for the client: in order, once, and never past a stop string. Pure.

Two workers send tokens of the same choice: the prefill worker the first one, the decode worker the rest. A retry
repeats some. The index of each token decides its position, not the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan

from pdserve.base.errors import TransferError
from pdserve.base.sampling import MAX_CONTINUED_TOKENS, ChoiceTokens, FinishReason, TokenLogprobs
from pdserve.model.tokenizer import StreamDetokenizer, Tokenizer
from router_svc.generation import Generation, TextRules
from router_svc.request.stop_strings import StopScanner


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """New output of one choice. `stop_reason` is the stop string or stop token of the request that ended it."""

    choice_index: int
    text: str
    token_ids: tuple[int, ...] = ()
    #: The text that each token completed; without tokens, the text that the end of the choice completed.
    pieces: tuple[str, ...] = field(default=(), compare=False)
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: Log-probabilities of the prompt's tokens behind the first one, in a delta with nothing else; None: in any other.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    #: The prompt's embedding, little-endian float32, in a delta with nothing else; None: in any other.
    embedding: bytes | None = field(default=None, repr=False)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    #: The tokens that the delta is made of, including any that the client had before.
    source: ChoiceTokens | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """A choice that another decode worker goes on with, or leaves alone because it is over."""

    choice_index: int
    token_ids: tuple[int, ...]
    is_over: bool


class Output:
    """All choices of one generation. Owned by its saga."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._choices = [_Choice(index, generation, tokenizer) for index in range(generation.sampling.n)]
        self._num_open = len(self._choices)
        self._has_logprobs = generation.sampling.logprobs is not None
        #: Tokens of all choices so far.
        self.completion_tokens = 0

    def push(self, tokens: Iterable[ChoiceTokens]) -> list[ChoiceDelta]:
        """Accepts tokens from any worker, in any order, repeated or not, and returns those new to the client."""
        deltas = []
        for chunk in tokens:
            self._require_plausible(chunk)
            for delta in self._choices[chunk.choice_index].push(chunk):
                deltas.append(delta)
                self.completion_tokens += len(delta.token_ids)
                self._num_open -= delta.finish_reason is not None
        return deltas

    def _require_plausible(self, chunk: ChoiceTokens) -> None:
        """Raises `TransferError` for tokens that no worker of ours sends."""
        if chunk.choice_index >= len(self._choices):
            raise TransferError(
                f"A worker sent tokens of choice {chunk.choice_index}, but there are {len(self._choices)}."
            )
        num_logprobs = len(chunk.token_ids) if self._has_logprobs else 0
        # A prefill worker that is given first tokens repeats them without log-probabilities.
        is_known = chunk.first_index + len(chunk.token_ids) <= len(self.tokens_of(chunk.choice_index))
        if len(chunk.logprobs) not in ({num_logprobs, 0} if is_known else {num_logprobs}):
            raise TransferError(
                f"A worker sent {len(chunk.token_ids)} tokens with {len(chunk.logprobs)} log-probabilities, where "
                f"{'each has' if self._has_logprobs else 'none has'} one."
            )
        require_numbers(chunk.logprobs)

    def forget_early(self) -> None:
        """Drops tokens that wait for their first one. Call it when the decode worker that sent them has failed."""
        for choice in self._choices:
            choice.early.clear()

    @property
    def is_finished(self) -> bool:
        """Whether every choice is complete."""
        return not self._num_open

    @property
    def has_tokens(self) -> bool:
        """Whether the client may have any token."""
        return self.completion_tokens > 0

    @property
    def has_first_tokens(self) -> bool:
        """Whether the first token of every choice is known."""
        return all(choice.token_ids for choice in self._choices)

    @property
    def first_tokens(self) -> list[int]:
        """The first token of every choice, with which a retry must start. Empty while one is unknown."""
        return [choice.token_ids[0] for choice in self._choices] if self.has_first_tokens else []

    @property
    def continuation(self) -> list[ChoiceSoFar]:
        """What another decode worker goes on behind: tokens of open choices, and the choices that are over.

        Very many tokens are left out: the worker then samples them again, and `push` drops them.
        """
        started = [(index, choice) for index, choice in enumerate(self._choices) if choice.token_ids]
        has_room = sum(len(choice.token_ids) for _, choice in started if not choice.finished) <= MAX_CONTINUED_TOKENS
        return [
            ChoiceSoFar(index, () if choice.finished else tuple(choice.token_ids), choice.finished)
            for index, choice in started
            if choice.finished or has_room
        ]

    @property
    def open_lengths(self) -> dict[int, int]:
        """Number of tokens of each choice that goes on."""
        return {index: len(choice.token_ids) for index, choice in enumerate(self._choices) if not choice.finished}

    @property
    def over(self) -> set[int]:
        """The choices that are complete."""
        return {index for index, choice in enumerate(self._choices) if choice.finished}

    def tokens_of(self, choice_index: int) -> list[int]:
        """All tokens of a choice so far; not to be changed."""
        return self._choices[choice_index].token_ids

    def contradicts(self, tokens: ChoiceTokens) -> bool:
        """Whether the client has another token at one of these positions."""
        if tokens.choice_index >= len(self._choices):
            return False
        known = self._choices[tokens.choice_index].token_ids[tokens.first_index :]
        return any(have != sent for have, sent in zip(known, tokens.token_ids, strict=False))

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each choice, "unfinished" where there is none yet."""
        return [choice.finish_reason.value if choice.finish_reason else "unfinished" for choice in self._choices]


@dataclass(slots=True)
class _Ended:
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(slots=True)
class _Gained:
    """New output of one `push`."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: _Ended | None = None


def detokenizer_of(rules: TextRules, tokenizer: Tokenizer) -> StreamDetokenizer:
    """Makes the text of an output, which stop strings may cut off."""
    return StreamDetokenizer(
        tokenizer, rules.skip_special_tokens, kept_tokens=rules.kept_tokens, unfinished=rules.unfinished
    )


class _Choice:
    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer) -> None:
        rules, sampling = generation.text, generation.sampling
        self._index = index
        self._detokenizer = detokenizer_of(rules, tokenizer)
        self._scanner = StopScanner(rules.stop, include=rules.include_stop_str_in_output)
        self._include_stop = rules.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = sampling.stop_token_ids
        #: Tokens that arrived before the first one: the decode worker can overtake the prefill worker's stream.
        self.early: list[ChoiceTokens] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, chunk: ChoiceTokens) -> list[ChoiceDelta]:
        if self.finished:
            return []
        if chunk.first_index > len(self.token_ids):
            self._hold(chunk)
            return []
        deltas = [self._delta(chunk)]
        while self.early and not self.finished and self.early[0].first_index <= len(self.token_ids):
            deltas.append(self._delta(self.early.pop(0)))
        return [delta for delta in deltas if delta is not None]

    def _delta(self, chunk: ChoiceTokens) -> ChoiceDelta | None:
        gained = _Gained()
        self._take(chunk, gained)
        if gained.ended is not None:
            self.finish_reason = gained.ended.finish_reason
        elif not gained.token_ids:
            return None
        return ChoiceDelta(
            choice_index=self._index,
            text="".join(gained.text),
            token_ids=tuple(gained.token_ids),
            pieces=_pieces(gained),
            logprobs=tuple(gained.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=gained.ended.stop_reason if gained.ended else None,
            source=chunk,
        )

    def _hold(self, chunk: ChoiceTokens) -> None:
        expected = self.early[-1].first_index + len(self.early[-1].token_ids) if self.early else 1
        if self.token_ids or chunk.first_index != expected:
            raise TransferError(
                f"A worker skipped tokens: choice {self._index} has {len(self.token_ids)} tokens, "
                f"and the next message starts at token {chunk.first_index}."
            )
        self.early.append(chunk)

    def _take(self, chunk: ChoiceTokens, gained: _Gained) -> None:
        """Adds the new tokens of `chunk`, up to the one that completes a stop string."""
        known = len(self.token_ids) - chunk.first_index
        last = len(chunk.token_ids) - 1
        for position in range(known, len(chunk.token_ids)):
            self.token_ids.append(chunk.token_ids[position])
            gained.token_ids.append(chunk.token_ids[position])
            gained.logprobs.extend(chunk.logprobs[position : position + 1])
            # The token that ends a choice is a signal and not text.
            ends_by_token = position == last and chunk.finish_reason is FinishReason.STOP
            if ends_by_token and not self._include_stop:
                break
            if self._emit(self._detokenizer.push([chunk.token_ids[position]]), gained):
                return
        if chunk.finish_reason is not None and not self._emit(self._detokenizer.finish(), gained):
            gained.text.append(self._scanner.flush())
            gained.ended = _Ended(chunk.finish_reason, self._if_requested(chunk.stop_token_id))

    def _emit(self, text: str, gained: _Gained) -> bool:
        """Adds text. True if it completed a stop string and thereby ended the choice."""
        scanned = self._scanner.push(text, may_end=len(self.token_ids) > self._min_tokens)
        gained.text.append(scanned.text)
        if scanned.matched is None:
            return False
        gained.ended = _Ended(FinishReason.STOP, scanned.matched)
        return True

    def _if_requested(self, stop_token_id: int | None) -> int | None:
        return stop_token_id if stop_token_id in self._stop_token_ids else None


def _pieces(gained: _Gained) -> tuple[str, ...]:
    """The texts of the tokens. What the end completed belongs to the last one."""
    last = max(len(gained.token_ids), 1) - 1
    return (*gained.text[:last], "".join(gained.text[last:])) if gained.text else ()


def require_numbers(logprobs: Iterable[TokenLogprobs]) -> None:
    """Raises `TransferError` for log-probabilities that no worker of ours sends."""
    for entry in logprobs:
        if len(entry.top_ids) != len(entry.top_logprobs):
            raise TransferError(
                f"A worker sent {len(entry.top_logprobs)} log-probabilities for {len(entry.top_ids)} tokens."
            )
        if isnan(entry.logprob) or any(map(isnan, entry.top_logprobs)):
            raise TransferError("A worker sent a log-probability that is not a number (NaN). See its log.")


def ended_by_stop_string(deltas: Sequence[ChoiceDelta]) -> list[int]:
    """The choices that ended with these deltas without the decode worker's knowledge."""
    return [delta.choice_index for delta in deltas if isinstance(delta.stop_reason, str)]
