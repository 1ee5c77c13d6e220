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
from pdserve.engine.philox import MAX_GUMBEL, MIN_GUMBEL, GumbelNoise, gumbel, min_word, philox4x32
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow
from tests.unit.engine.fakes import row

GREEDY = SamplingParams(temperature=0.0)
NAN = float("nan")


def sample(logits: Tensor | list[list[float]], rows: list[SampleRow]) -> list[SampleResult]:
    table = logits if isinstance(logits, Tensor) else torch.tensor(logits)
    return Sampler().sample(table, rows, range(len(rows)))


def tokens(logits: Tensor | list[list[float]], rows: list[SampleRow]) -> list[int]:
    results = sample(logits, rows)
    assert all(isinstance(result, Sampled) for result in results)
    return [result.token_id for result in results if isinstance(result, Sampled)]


def drawn(logits: list[float], params: SamplingParams, count: int = 400) -> Counter[int]:
    """Tokens at `count` positions that all have the same logits."""
    rows = [row(params, position=position) for position in range(count)]
    return Counter(tokens(torch.tensor([logits]).repeat(count, 1), rows))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: str
) -> None:
    even, odd, keys = (np.array([[word] for word in words], np.uint64) for words in (counter[::2], counter[1::2], key))
    even, odd = philox4x32(even, odd, keys)
    assert " ".join(f"{int(word):08x}" for word in (even[0, 0], odd[0, 0], even[1, 0], odd[1, 0])) == words


def test_noise_of_a_token_does_not_depend_on_how_it_is_asked_for() -> None:
    for key in [(5, 0, 9), (-(2**63), 1, 9), (2**63 - 1, 127, 8000)]:
        noise = GumbelNoise(*key)
        whole = gumbel(noise.words_of_vocabulary(1001))
        for ids in (np.arange(1000, -1, -3), np.array([1000, 0, 401]), np.array([3])):
            assert (noise.of_tokens(ids) == whole[ids]).all()


def test_noise_has_the_mean_and_variance_of_a_gumbel_variable() -> None:
    noise = np.stack([gumbel(GumbelNoise(1, 0, position).words_of_vocabulary(20_000)) for position in range(50)])
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_noise_lies_between_its_bounds_and_a_word_below_the_least_has_less() -> None:
    assert gumbel(np.array([0, 2**32 - 1], np.uint64)).tolist() == [
        pytest.approx(MIN_GUMBEL, rel=1e-12),
        pytest.approx(MAX_GUMBEL, rel=1e-9),
    ]
    for noise in (-3.2, -1.0, 0.0, 6.0, 12.0, 22.0):
        word = min_word(noise)
        assert word == 0 or gumbel(np.array([word - 1], np.uint64))[0] < noise


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    assert tokens([[0.0, 3.0, 3.0, 1.0], [-0.0, 0.0, -1.0, -0.0]], [row(GREEDY), row(GREEDY)]) == [1, 0]


def test_equal_scores_go_to_the_lowest_id_when_sampling_too() -> None:
    assert sampler_module._best(np.array([7, 5, 3]), np.array([1.0, 0.0, 1.0])) == 3


def test_a_token_is_drawn_as_if_the_noise_of_all_had_been_computed() -> None:
    generator = np.random.default_rng(2)
    for position in range(60):
        scale = (0.2, 1.0, 5.0)[position % 3]
        logits = (generator.standard_normal(5000) * scale).astype(np.float32)
        params = SamplingParams(seed=9, temperature=(0.3, 1.0, 2.0)[position // 3 % 3])
        noise = gumbel(GumbelNoise(9, 0, position).words_of_vocabulary(5000))
        scores = (logits.astype(np.float64) - float(logits.max())) / params.temperature + noise
        assert tokens(torch.from_numpy(logits).unsqueeze(0), [row(params, position=position)]) == [scores.argmax()]


def test_seed_choice_and_position_each_make_another_draw() -> None:
    base = SamplingParams(seed=1)
    logits = torch.zeros(1, 5000)
    rows = [row(base), row(base), row(base, position=1), row(base, choice=1), row(SamplingParams(seed=2))]
    drawn_ids = tokens(logits.repeat(5, 1), rows)
    assert drawn_ids[0] == drawn_ids[1]
    assert len(set(drawn_ids)) == 4


def test_all_64_bits_of_the_seed_count() -> None:
    rows = [row(SamplingParams(seed=seed)) for seed in (0, 1 << 32, -1, -(1 << 32), 1 << 62)]
    assert len(set(tokens(torch.zeros(5, 5000), rows))) == 5


def test_tokens_are_drawn_with_the_probabilities_of_the_softmax() -> None:
    probabilities = [0.5, 0.25, 0.125, 0.125]
    count = 8000
    seen = drawn([math.log(p) for p in probabilities], SamplingParams(seed=3), count)
    chi_square = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(probabilities))
    assert chi_square < 16.3  # 0.1 % point for 3 degrees of freedom


def test_temperature_sharpens_and_flattens() -> None:
    logits = [math.log(0.8), math.log(0.2)]
    cold, hot = (drawn(logits, SamplingParams(temperature=t, seed=3), 2000)[0] for t in (0.5, 10.0))
    assert cold / 2000 == pytest.approx(0.64 / 0.68, abs=0.03)
    assert hot / 2000 == pytest.approx(0.535, abs=0.04)


@pytest.mark.parametrize("temperature", [1e-12, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
    assert drawn([1.0, 1.001, 0.0, 1.0009999], params, 50) == {1: 50}


def test_top_k_keeps_the_k_most_likely_and_the_lowest_ids_of_equals() -> None:
    assert set(drawn([1.0, 2.0, 1.0, 1.0, 0.0], SamplingParams(top_k=3, seed=1))) == {0, 1, 2}
    assert set(drawn([1.0, 2.0, 1.0], SamplingParams(top_k=99, seed=1))) == {0, 1, 2}


def test_top_p_keeps_the_smallest_head_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    assert set(drawn(logits, SamplingParams(top_p=0.39, seed=1))) == {1}
    assert set(drawn(logits, SamplingParams(top_p=0.41, seed=1))) == {1, 2}
    assert set(drawn(logits, SamplingParams(top_p=0.95, seed=1))) == {0, 1, 2, 3}
    assert set(drawn(logits, SamplingParams(top_p=0.0, seed=1))) == {1}


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(drawn(logits, SamplingParams(min_p=0.25, seed=1))) == {0, 1, 2}


def test_top_p_counts_the_probability_that_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two most likely, the first holds 0.57.
    assert set(drawn(logits, SamplingParams(top_k=2, top_p=0.57, seed=1))) == {0}
    assert set(drawn(logits, SamplingParams(top_k=2, top_p=0.58, seed=1))) == {0, 1}


def definition(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token as the definition has it: everything sorted, nothing left out early."""
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
def test_leaving_out_early_what_cannot_win_changes_no_token(params: SamplingParams, scale: float) -> None:
    logits = (torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)) * scale).round(decimals=1)
    rows = [row(params, position=position) for position in range(40)]
    assert tokens(logits, rows) == [definition(logits[index], params, index) for index in range(40)]


def test_repetition_penalty_divides_or_multiplies_whatever_was_in_prompt_or_output() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    # 1, 2, 3 are in the prompt and 5 in the output; 4 was not seen.
    assert tokens([[-9.0, 3.0, 3.0, 3.0, 1.6, 3.1]], [row(params, output=[5])]) == [4]
    assert tokens([[-9.0, -2.0, -2.0, -2.0, -3.0, -1.6]], [row(params, output=[5])]) == [4]


def test_presence_and_frequency_penalties_look_at_the_output_only() -> None:
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


def test_banned_tokens_are_not_chosen() -> None:
    params = SamplingParams(seed=1, min_tokens=1)
    banned = SampleRow(params=params, choice_index=0, tokens=array("q", [1]), num_prompt=1, stop_ids=frozenset({1}))
    assert tokens([[0.0, 50.0, 0.0]], [banned]) != [1]
    banned.tokens.append(2)
    assert tokens([[0.0, 50.0, 0.0]], [banned]) == [1]


def test_editing_one_row_leaves_the_model_logits_as_they_are() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    before = logits.clone()
    sample(logits, [row(SamplingParams(logit_bias={0: 9.0}, repetition_penalty=1.5, seed=1))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(seed=1), SamplingParams(top_p=0.5, seed=1), SamplingParams(temperature=0, logprobs=3)],
)
@pytest.mark.parametrize("bad", [[0.0, NAN, 1.0], [-math.inf] * 3, [0.0, math.inf, 1.0]])
def test_logits_that_are_no_numbers_fail_their_row_only(params: SamplingParams, bad: list[float]) -> None:
    first, failed, last = sample([[0.0, 0.0, 9.0], bad, [9.0, 0.0, 0.0]], [row(GREEDY), row(params), row(GREEDY)])
    assert isinstance(failed, SampleFailure)
    assert "no finite maximum" in failed.reason
    assert [first, last] == [Sampled(token_id=2), Sampled(token_id=0)]


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
    told = result.logprobs
    assert told is not None
    assert math.exp(told.logprob) == pytest.approx(0.15)
    assert told.rank == 3
    assert told.top_ids == (0, 1)
    assert [math.exp(value) for value in told.top_logprobs] == pytest.approx([0.5, 0.3])


def test_alternatives_of_equal_probability_come_in_the_order_of_their_ids() -> None:
    logits = [[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]]
    params = SamplingParams(temperature=0.0, logprobs=5, logit_bias={3: 9.0})
    (result,) = sample(logits, [row(params)])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert result.logprobs.top_ids == (1, 2, 4, 0, 3)
    assert result.logprobs.rank == 5


def test_zero_alternatives_still_tell_the_token_and_more_than_the_vocabulary_tell_all() -> None:
    none, everything = (SamplingParams(temperature=0.0, logprobs=count) for count in (0, 20))
    first, second = sample([[0.0, 1.0], [0.0, 1.0]], [row(none), row(everything)])
    assert isinstance(first, Sampled)
    assert isinstance(second, Sampled)
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert (first.logprobs.rank, first.logprobs.top_ids) == (1, ())
    assert second.logprobs.top_ids == (1, 0)


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_alternatives_are_the_head_of_the_whole_order_however_far_behind(scale: float) -> None:
    logits = (torch.randn(1, 500, generator=torch.Generator().manual_seed(5)) * scale).round()
    (result,) = sample(logits, [row(SamplingParams(temperature=0.0, logprobs=20))])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert result.logprobs.top_ids == tuple(np.argsort(-logits[0].numpy(), kind="stable")[:20].tolist())


def test_no_logprobs_unless_asked_for() -> None:
    assert sample([[0.0, 1.0]], [row(GREEDY)]) == [Sampled(token_id=1)]
