"""The host's sampler: penalties, truncation, ties, failures and log-probabilities."""

from __future__ import annotations

import math
from array import array
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.base.sampling import SamplingParams
from pdserve.engine import sampler as sampler_module
from pdserve.engine.philox import GumbelNoise, gumbel
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Fault, Sampled, SampleFailure, SampleResult, SampleRow
from tests.unit.engine.fakes import row
from tests.unit.engine.random_grammar import RandomGrammar, with_grammar

GREEDY = SamplingParams(temperature=0.0)
NAN = float("nan")


def sample(logits: Tensor | list[list[float]], rows: list[SampleRow]) -> list[SampleResult]:
    table = logits if isinstance(logits, Tensor) else torch.tensor(logits)
    return Sampler().sample(table, rows, range(len(rows)))


def tokens(logits: Tensor | list[list[float]], rows: list[SampleRow]) -> list[int]:
    results = sample(logits, rows)
    assert all(isinstance(result, Sampled) for result in results)
    return [result.token_id for result in results if isinstance(result, Sampled)]


def sampled(logits: list[float], params: SamplingParams, count: int = 400) -> Counter[int]:
    """Counts of the tokens sampled at `count` positions with the same logits."""
    rows = [row(params, position=position) for position in range(count)]
    return Counter(tokens(torch.tensor([logits]).repeat(count, 1), rows))


def test_greedy_takes_the_largest_logit_and_of_equal_ones_the_lowest_id() -> None:
    assert tokens([[0.0, 3.0, 3.0, 1.0], [-0.0, 0.0, -1.0, -0.0]], [row(GREEDY), row(GREEDY)]) == [1, 0]


def test_sampling_takes_the_lowest_id_of_equal_scores() -> None:
    same_noise = np.full(3, 5, np.uint32)
    assert sampler_module._best(np.array([7, 5, 3]), np.array([-1.0, -2.0, -1.0]), same_noise) == 3


def test_a_sampled_token_is_the_one_that_noise_for_all_tokens_gives() -> None:
    generator = np.random.default_rng(2)
    for position in range(60):
        scale = (0.2, 1.0, 5.0)[position % 3]
        logits = (generator.standard_normal(5000) * scale).astype(np.float32)
        params = SamplingParams(seed=9, temperature=(0.3, 1.0, 2.0)[position // 3 % 3])
        noise = gumbel(GumbelNoise(9, 0, position).words_of_vocabulary(5000))
        scores = (logits.astype(np.float64) - float(logits.max())) / params.temperature + noise
        assert tokens(torch.from_numpy(logits).unsqueeze(0), [row(params, position=position)]) == [scores.argmax()]


def test_seed_choice_and_position_each_change_the_samples() -> None:
    base = SamplingParams(seed=1)
    logits = torch.zeros(1, 5000)
    rows = [row(base), row(base), row(base, position=1), row(base, choice=1), row(SamplingParams(seed=2))]
    sampled_ids = tokens(logits.repeat(5, 1), rows)
    assert sampled_ids[0] == sampled_ids[1]
    assert len(set(sampled_ids)) == 4


def test_all_64_bits_of_the_seed_count() -> None:
    rows = [row(SamplingParams(seed=seed)) for seed in (0, 1 << 32, -1, -(1 << 32), 1 << 62)]
    assert len(set(tokens(torch.zeros(5, 5000), rows))) == 5


def test_tokens_are_sampled_with_the_probabilities_of_the_softmax() -> None:
    probabilities = [0.5, 0.25, 0.125, 0.125]
    count = 8000
    seen = sampled([math.log(p) for p in probabilities], SamplingParams(seed=3), count)
    chi_square = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(probabilities))
    assert chi_square < 16.3  # The 0.1 % point for 3 degrees of freedom.


def test_temperature_sharpens_and_flattens() -> None:
    logits = [math.log(0.8), math.log(0.2)]
    cold, hot = (sampled(logits, SamplingParams(temperature=t, seed=3), 2000)[0] for t in (0.5, 10.0))
    assert cold / 2000 == pytest.approx(0.64 / 0.68, abs=0.03)
    assert hot / 2000 == pytest.approx(0.535, abs=0.04)


@pytest.mark.parametrize("temperature", [1e-12, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
    assert sampled([1.0, 1.001, 0.0, 1.0009999], params, 50) == {1: 50}


def test_top_k_keeps_the_k_likeliest_tokens_and_of_equal_ones_the_lowest_ids() -> None:
    assert set(sampled([1.0, 2.0, 1.0, 1.0, 0.0], SamplingParams(top_k=3, seed=1))) == {0, 1, 2}
    assert set(sampled([1.0, 2.0, 1.0], SamplingParams(top_k=99, seed=1))) == {0, 1, 2}


def test_top_p_keeps_the_smallest_head_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    assert set(sampled(logits, SamplingParams(top_p=0.39, seed=1))) == {1}
    assert set(sampled(logits, SamplingParams(top_p=0.41, seed=1))) == {1, 2}
    assert set(sampled(logits, SamplingParams(top_p=0.95, seed=1))) == {0, 1, 2, 3}
    assert set(sampled(logits, SamplingParams(top_p=0.0, seed=1))) == {1}


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(sampled(logits, SamplingParams(min_p=0.25, seed=1))) == {0, 1, 2}


def test_top_p_applies_to_the_probability_that_top_k_keeps() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # The first of the two likeliest tokens has 0.57 of their probability.
    assert set(sampled(logits, SamplingParams(top_k=2, top_p=0.57, seed=1))) == {0}
    assert set(sampled(logits, SamplingParams(top_k=2, top_p=0.58, seed=1))) == {0, 1}


def definition(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token by definition: all tokens are sorted, and none is dropped early."""
    values = logits.numpy()
    scaled = (values.astype(np.float64) - float(values.max())) / params.temperature
    order = np.argsort(-values, kind="stable")
    kept = order[: params.top_k or len(order)]
    kept = kept[np.exp(scaled[kept]) >= params.min_p]
    weights = (np.exp(scaled[kept]) * 2.0**32).astype(np.int64)
    if params.top_p < 1:
        before = weights.cumsum() - weights
        kept = kept[(before < weights.sum() * params.top_p) | (np.arange(len(kept)) == 0)]
    scores = np.full(len(values), -np.inf)
    noise = gumbel(GumbelNoise(params.seed, 0, position).words_of_vocabulary(len(values)))
    scores[kept] = scaled[kept] + noise[kept]
    return int(scores.argmax())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9, seed=1),
        SamplingParams(top_p=0.999, temperature=1.7, seed=1),
        SamplingParams(top_p=0.9, top_k=60, seed=1),
        SamplingParams(top_p=0.0, seed=1),
        SamplingParams(top_p=0.5, top_k=3, seed=1),
        SamplingParams(top_p=0.9, min_p=0.3, seed=1),
        SamplingParams(min_p=0.01, seed=1),
        SamplingParams(top_k=700, temperature=0.7, seed=1),
    ],
)
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0, 30.0])
def test_dropping_tokens_early_changes_no_sample(params: SamplingParams, scale: float) -> None:
    logits = (torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)) * scale).round(decimals=1)
    rows = [row(params, position=position) for position in range(40)]
    assert tokens(logits, rows) == [definition(logits[index], params, index) for index in range(40)]


def test_repetition_penalty_applies_to_tokens_of_prompt_and_output() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    # 1, 2, 3 are in the prompt and 5 is in the output; 4 is in neither.
    assert tokens([[-9.0, 3.0, 3.0, 3.0, 1.6, 3.1]], [row(params, output=[5])]) == [4]
    assert tokens([[-9.0, -2.0, -2.0, -2.0, -3.0, -1.6]], [row(params, output=[5])]) == [4]


def test_presence_and_frequency_penalties_apply_to_the_output_only() -> None:
    logits = [[-9.0, 3.0, 2.8, 0.0, 2.0, 0.0]]
    presence = SamplingParams(temperature=0.0, presence_penalty=0.5)
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    assert tokens(logits, [row(presence)]) == [1]
    assert tokens(logits, [row(presence, output=[1, 1, 1, 2])]) == [1]
    assert tokens(logits, [row(presence, output=[1, 1, 1])]) == [2]
    assert tokens(logits, [row(frequency, output=[1, 1, 1, 2, 2])]) == [4]


def test_logit_bias_is_added_before_choosing() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={0: 5.0, 1: -100.0})
    assert tokens([[0.0, 4.0, 3.0]], [row(params)]) == [0]


def test_banned_tokens_are_never_sampled() -> None:
    params = SamplingParams(seed=1, min_tokens=1)
    banned = SampleRow(params=params, choice_index=0, tokens=array("q", [1]), num_prompt=1, stop_ids=frozenset({1}))
    assert tokens([[0.0, 50.0, 0.0]], [banned]) != [1]
    banned.tokens.append(2)
    assert tokens([[0.0, 50.0, 0.0]], [banned]) == [1]


def test_sampling_does_not_modify_the_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    before = logits.clone()
    sample(logits, [row(SamplingParams(logit_bias={0: 9.0}, repetition_penalty=1.5, seed=1))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(seed=1), SamplingParams(top_p=0.5, seed=1), SamplingParams(temperature=0, logprobs=3)],
)
@pytest.mark.parametrize("bad", [[0.0, NAN, 1.0], [-math.inf] * 3, [0.0, math.inf, 1.0]])
def test_logits_without_a_finite_maximum_fail_only_their_row(params: SamplingParams, bad: list[float]) -> None:
    first, failed, last = sample([[0.0, 0.0, 9.0], bad, [9.0, 0.0, 0.0]], [row(GREEDY), row(params), row(GREEDY)])
    assert isinstance(failed, SampleFailure)
    assert "no finite maximum" in failed.reason
    assert failed.fault is Fault.LOGITS
    assert [first, last] == [Sampled(token_id=2), Sampled(token_id=0)]


def test_a_row_that_raises_an_error_fails_alone() -> None:
    # NaN scores: parameters that `check_sampling` refuses stand for any defect in the preparation of a row.
    broken = SamplingParams(temperature=math.inf, logit_bias={0: -math.inf}, top_p=0.5)
    first, failed, last = sample([[0.0, 0.0, 9.0]] * 3, [row(GREEDY), row(broken), row(GREEDY)])
    assert [first, last] == [Sampled(token_id=2), Sampled(token_id=2)]
    assert isinstance(failed, SampleFailure)
    assert failed.fault is Fault.PREPARATION
    assert "could not be prepared" in failed.reason


def test_a_lack_of_memory_is_no_failure_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("pdserve.engine.sampler.edited_logits", without_memory)
    with pytest.raises(MemoryError):
        sample([[0.0, 1.0]], [row(SamplingParams(seed=1))])


def test_rows_can_share_one_row_of_logits() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    rows = [row(GREEDY), row(GREEDY, choice=1), row(GREEDY)]
    results = Sampler().sample(logits, rows, [1, 1, 0])
    assert results == [Sampled(token_id=0), Sampled(token_id=0), Sampled(token_id=1)]


def test_logprobs_are_those_of_the_raw_softmax() -> None:
    params = SamplingParams(
        temperature=0.3, top_k=1, logprobs=2, logit_bias={2: 50.0}, repetition_penalty=3.0, presence_penalty=1.0
    )
    probabilities = [0.5, 0.3, 0.15, 0.05]
    (result,) = sample([[math.log(p) for p in probabilities]], [row(params, output=[0])])
    assert isinstance(result, Sampled)
    assert result.token_id == 2
    logprobs = result.logprobs
    assert logprobs is not None
    assert math.exp(logprobs.logprob) == pytest.approx(0.15)
    assert logprobs.rank == 3
    assert logprobs.top_ids == (0, 1)
    assert [math.exp(value) for value in logprobs.top_logprobs] == pytest.approx([0.5, 0.3])


def test_logprobs_of_a_token_that_a_grammar_forces_are_those_before_its_mask() -> None:
    forced = with_grammar(row(SamplingParams(logprobs=2, seed=1)), RandomGrammar(2, 3, 1e-9))
    [result] = sample([[math.log(p) for p in (0.749, 0.25, 0.001)]], [forced])
    assert isinstance(result, Sampled)
    assert result.token_id == 2
    assert result.logprobs is not None
    assert math.exp(result.logprobs.logprob) == pytest.approx(0.001)
    assert result.logprobs.rank == 3
    # The grammar forbids both alternatives.
    assert result.logprobs.top_ids == (0, 1)
    assert [math.exp(value) for value in result.logprobs.top_logprobs] == pytest.approx([0.749, 0.25])


def test_alternatives_of_equal_probability_are_in_the_order_of_ids() -> None:
    logits = [[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]]
    params = SamplingParams(temperature=0.0, logprobs=5, logit_bias={3: 9.0})
    (result,) = sample(logits, [row(params)])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert result.logprobs.top_ids == (1, 2, 4, 0, 3)
    assert result.logprobs.rank == 5


def test_logprobs_0_describes_the_token_and_more_than_the_vocabulary_describes_all() -> None:
    none, everything = (SamplingParams(temperature=0.0, logprobs=count) for count in (0, 20))
    first, second = sample([[0.0, 1.0], [0.0, 1.0]], [row(none), row(everything)])
    assert isinstance(first, Sampled)
    assert isinstance(second, Sampled)
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert (first.logprobs.rank, first.logprobs.top_ids) == (1, ())
    assert second.logprobs.top_ids == (1, 0)


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_alternatives_are_the_likeliest_tokens_however_unlikely(scale: float) -> None:
    logits = (torch.randn(1, 500, generator=torch.Generator().manual_seed(5)) * scale).round()
    (result,) = sample(logits, [row(SamplingParams(temperature=0.0, logprobs=20))])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert result.logprobs.top_ids == tuple(np.argsort(-logits[0].numpy(), kind="stable")[:20].tolist())


def test_logprobs_are_absent_unless_requested() -> None:
    assert sample([[0.0, 1.0]], [row(GREEDY)]) == [Sampled(token_id=1)]
