"""Tokens that a grammar forces are appended at once, and change no other token."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

import pytest

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.token_rules import only
from pdserve.model.grammar import TokenBits
from pdserve.model.thinking import OutputGrammar
from tests.unit.decode_svc.decode_worker import ALWAYS, PROMPT, A, B, DecodeWorker, decode, job
from tests.unit.engine.fakes import VOCAB, expected, limits

#: Tokens that may not be chosen, by position in the output: runs of one, four and ten tokens.
FORCED = {2: 11, 6: 3, 7: 3, 8: 14, 9: 15, **{position: position for position in range(14, 24)}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, grammar="forced")


class ForcingGrammar:
    """Both the grammar and the state of one output."""

    knows_end = False

    def __init__(self, forced: Mapping[int, int]) -> None:
        self._forced = forced
        self._position = 0

    def start(self) -> ForcingGrammar:
        """As `Grammar.start`."""
        return ForcingGrammar(self._forced)

    def can_run_ahead(self, tokens: array[int], num_prompt: int) -> bool:
        """As `GrammarState.can_run_ahead`."""
        return False

    def find(self, tokens: array[int], num_prompt: int) -> None:
        """As `GrammarState.find`."""

    def is_found(self, tokens: array[int], num_prompt: int) -> bool:
        """As `GrammarState.is_found`."""
        return True

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits | None:
        """As `ThinkingState.allowed`."""
        self._position = len(tokens) - num_prompt
        return only(self._forced[self._position], VOCAB) if self._position in self._forced else listed

    def forced(self, token: int) -> list[int]:
        """As `GrammarState.forced`."""
        following, position = list[int](), self._position
        while self._forced.get(position) == (following[-1] if following else token):
            position += 1
            if position not in self._forced:
                break
            following.append(self._forced[position])
        return following


def forcing() -> OutputGrammar:
    return cast(OutputGrammar, ForcingGrammar(FORCED))


def one_by_one(prompt: list[int], params: SamplingParams, choice: int = 0) -> list[int]:
    """The output of which each token was sampled."""
    return expected(prompt, params, choice, limits(), forcing())


def start(worker: DecodeWorker, request_id: RequestId, prompt: list[int], params: SamplingParams) -> None:
    worker.scheduler.reserve(replace(job(request_id, prompt, params, threshold=ALWAYS), grammar=forcing()))


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, temperature=1.0, seed=3, n=3),
        replace(GREEDY, temperature=1.0, seed=5, presence_penalty=1.5, logit_bias={3: -100.0}),
        # Within a run, at its end, and behind it.
        *(replace(GREEDY, max_tokens=max_tokens) for max_tokens in (8, 10, 11, 18)),
        replace(GREEDY, stop_token_ids=(14,)),
    ],
)
def test_the_output_is_that_of_tokens_one_by_one(params: SamplingParams) -> None:
    worker = decode(60, appends_forced=True)
    start(worker, A, PROMPT, params)
    worker.run()
    for choice in range(params.n):
        assert worker.tokens(A, choice) == one_by_one(PROMPT, params, choice)
    assert len(worker.plans) < len(worker.tokens(A))
    assert sum(plan.num_prefill_tokens for plan in worker.plans) == len(PROMPT)
    assert worker.all_free


def test_steps_are_saved() -> None:
    """A run saves as many steps as it has tokens, but for its first one, which is sampled."""
    steps = []
    for appends_forced in (False, True):
        worker = decode(60, appends_forced=appends_forced)
        start(worker, A, PROMPT, GREEDY)
        worker.run()
        steps.append(sum(1 for plan in worker.plans if plan.scheduled()))
    assert steps[0] == len(one_by_one(PROMPT, GREEDY))
    assert steps[1] == steps[0] - (4 - 1) - (10 - 1)


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"bad_words": ((3, 3),)}, {"allowed_token_ids": tuple(range(31))}])
def test_each_is_sampled_where_more_than_the_token_is_wanted(fields: dict[str, object]) -> None:
    worker, params = decode(60, appends_forced=True), replace(GREEDY, **fields)  # type: ignore[arg-type]
    start(worker, A, PROMPT, replace(params, max_tokens=6))
    worker.run()
    assert all(not chunk.is_output for plan in worker.plans for chunk in plan.chunks)
    assert worker.tokens(A) == one_by_one(PROMPT, replace(params, max_tokens=6))


def test_preemption_within_a_run_changes_nothing() -> None:
    """With few blocks, and a budget that splits what is computed again."""
    worker = decode(13, appends_forced=True, max_num_batched_tokens=6)
    prompts = {A: PROMPT, B: [3, *PROMPT[:7]]}
    for name, prompt in prompts.items():
        start(worker, name, prompt, GREEDY)
    worker.run()
    assert worker.scheduler.load().num_preemptions
    for name, prompt in prompts.items():
        assert worker.tokens(name) == one_by_one(prompt, GREEDY)
    assert worker.all_free
