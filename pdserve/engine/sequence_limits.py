"""Bounds of every sequence on a worker, and when a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from pdserve.base.errors import RequestError
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams, check_sampling, check_vocabulary
from pdserve.engine.sequence import Sampled, SampleRow, Sequence
from pdserve.engine.token_rules import only


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimits:
    """Bounds of every sequence, from the model and the worker, and when a sequence ends."""

    #: Prompt and output tokens together.
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    #: Tokens that a grammar forces are appended at once.
    appends_forced: bool = False

    def check(self, prompt: Items[int], params: SamplingParams) -> None:
        """Raises `RequestError` for a request that would break a step. Call it before anything of it is stored."""
        if not prompt:
            raise RequestError("The prompt has no tokens. Send at least one.", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens (limit {self.max_model_len - 1}, which leaves one for output). "
                "Shorten the prompt.",
                param="prompt",
            )
        check_vocabulary("prompt", prompt, self.vocab_size)
        check_sampling(params, self.vocab_size)

    def check_first_tokens(self, tokens: Items[int], params: SamplingParams) -> None:
        """Raises `RequestError` unless there is one valid token per choice."""
        if len(tokens) != params.n or not all(0 <= token < self.vocab_size for token in tokens):
            raise RequestError(
                f"first_tokens has {len(tokens)} token ids, but must have {params.n}, one for each choice, all between "
                f"0 and {self.vocab_size - 1}.",
                param="first_tokens",
            )

    def choice_tokens(self, sequence: Sequence, choice_index: int, sampled: Sampled) -> ChoiceTokens:
        """The next token as the client receives it, with the reason if it ends the choice. Changes nothing."""
        token, params, num_tokens = sampled.token_id, sequence.params, len(sequence.tokens)
        index = num_tokens - sequence.num_prompt
        reason: FinishReason | None = None
        if token in self.stop_ids(params):
            reason = FinishReason.STOP
        elif self._is_last(params, index, num_tokens):
            reason = FinishReason.LENGTH
        return ChoiceTokens(
            choice_index=choice_index,
            first_index=index,
            token_ids=(token,),
            logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
            finish_reason=reason,
            stop_token_id=token if reason is FinishReason.STOP else None,
        )

    def take(self, sequence: Sequence, sampled: Sampled) -> ChoiceTokens:
        """Adds the next token to a running sequence, and those that are forced behind it: what the client receives."""
        row = sequence.sampling if self.appends_forced else None
        forced = [] if row is None else row.forced(sampled.token_id)
        taken = self.choice_tokens(sequence, sequence.choice_index, sampled)
        sequence.tokens.append(sampled.token_id)
        sequence.num_forced = 0
        for token in forced:
            if taken.finish_reason is not None:
                break
            more = self.choice_tokens(sequence, sequence.choice_index, Sampled(token_id=token))
            taken = replace(more, first_index=taken.first_index, token_ids=(*taken.token_ids, token))
            sequence.tokens.append(token)
            sequence.num_forced += 1
        return taken

    def can_run_ahead(self, sequence: Sequence) -> bool:
        """Whether the step after the next can be launched before the next token is known.

        The sequence may still end with that token, but only because of which one it is.
        """
        row = sequence.sampling
        return row is not None and not self._is_last(row.params, row.position, len(row.tokens))

    def sample_row(self, sequence: Sequence, choice_index: int) -> SampleRow:
        """The inputs of sampling the sequence's next token, and all later ones."""
        params, rules = sequence.params, sequence.rules
        # A grammar knows where its output is complete, and has to end then.
        ends = self.eos_token_ids if params.grammar else ()
        return SampleRow(
            params=params,
            choice_index=choice_index,
            tokens=sequence.tokens,
            num_prompt=sequence.num_prompt,
            stop_ids=self.stop_ids(params),
            grammar=None if sequence.grammar is None else sequence.grammar.start(),
            rules=rules,
            listed=None if rules is None else rules.allowed(self.vocab_size, ends),
        )

    def score_rows(self, sequence: Sequence, start: int, stop: int) -> tuple[SampleRow, ...]:
        """Inputs of "sampling" the tokens behind prompt tokens `[start, stop)`, each the only one that is allowed.

        Samplers report log-probabilities of the raw logits, so those of a prompt are made like those of an output.
        """
        return tuple(
            SampleRow(
                params=sequence.params,
                choice_index=0,
                tokens=sequence.tokens,
                num_prompt=sequence.num_prompt,
                listed=only(sequence.tokens[index], self.vocab_size),
            )
            for index in range(start + 1, min(stop + 1, sequence.num_prompt))
        )

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Token ids that end a sequence; none of them may be sampled before `min_tokens`.

        With a grammar, the end of text always does: it is allowed only where the output is complete.
        """
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos and not params.grammar else own | self.eos_token_ids

    def _is_last(self, params: SamplingParams, index: int, num_tokens: int) -> bool:
        """Whether the output's token `index`, which follows `num_tokens` tokens, is the last whichever it is."""
        return index + 1 >= params.max_tokens or num_tokens + 1 >= self.max_model_len
