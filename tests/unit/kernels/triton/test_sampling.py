"""Sampled tokens and truncation against the engine's sampler."""

from __future__ import annotations

import dataclasses
import math
from array import array

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.devices import DEVICE, HAS_GPU, gpu_only, needs_triton

# isort: split
from kernels.triton.sampling import sample
from pdserve.base.sampling import SamplingParams
from pdserve.engine.logits import edited_logits
from pdserve.engine.sequence import SampleRow
from tests.unit.engine.fakes import row
from tests.unit.kernels.triton.sampled import kept, reference_tokens, sample_rows, scores

# The interpreter computes with numpy, which warns about infinities.
pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

GREEDY = SamplingParams(temperature=0.0)
NAN = float("nan")
#: Tokens with closer scores are interchangeable: logarithms and exponentials differ in the last bits.
CLOSE = 1e-9


def normal(num_rows: int, vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def tokens(logits: Tensor, rows: list[SampleRow], logits_rows: list[int] | None = None) -> list[int]:
    indices = list(range(len(rows))) if logits_rows is None else logits_rows
    before = logits.clone()
    on_device = logits.to(DEVICE)
    token_ids = sample(on_device, sample_rows(rows, indices)).token_ids.tolist()
    assert torch.equal(on_device.cpu().nan_to_num(), before.nan_to_num()), "the logits were modified"
    return token_ids


def check(logits: Tensor, rows: list[SampleRow]) -> None:
    """Asserts the reference's tokens, except where its two best scores are nearly equal."""
    actual, expected = tokens(logits, rows), reference_tokens(logits, rows)
    for index, (token, other) in enumerate(zip(actual, expected, strict=True)):
        if token != other:
            assert token >= 0, f"row {index}: failed"
            assert other >= 0, f"row {index}: did not fail"
            assert rows[index].params.temperature > 0
            own = scores(logits[index], rows[index])
            assert abs(own[token] - own[other]) < CLOSE, f"row {index}: {token}, not {other}"


def check_kept(logits: Tensor, rows: list[SampleRow]) -> None:
    """Asserts that truncation keeps the same tokens as its definition, among those that can be chosen."""
    sampled = sample(logits.to(DEVICE), sample_rows(rows, list(range(len(rows)))))
    for index, (threshold, num_ties) in enumerate(
        zip(sampled.threshold.tolist(), sampled.num_ties.tolist(), strict=True)
    ):
        edited = edited_logits(logits[index].numpy(), rows[index])
        equal = edited == np.float32(threshold)
        left = (edited > np.float32(threshold)) | (equal & (equal.cumsum() <= num_ties))
        reachable = edited >= edited.max() - 25 * rows[index].params.temperature
        assert (left & reachable).tolist() == (kept(logits[index], rows[index]) & reachable).tolist(), f"row {index}"


@pytest.mark.parametrize("vocab", [1, 7, 97, 1000, 5000])
def test_tokens_match_the_reference(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    rows = []
    for _ in range(200 if HAS_GPU else 8):
        params = SamplingParams(
            temperature=float(generator.choice([0.0, 0.3, 0.7, 1.0, 1.9])),
            top_k=int(generator.choice([0, 0, 1, 5, 40, 1200])),
            top_p=float(generator.choice([1.0, 0.3, 0.95, 0.999])),
            min_p=float(generator.choice([0.0, 0.0, 0.02, 0.4])),
            repetition_penalty=float(generator.choice([1.0, 1.0, 1.3])),
            presence_penalty=float(generator.choice([0.0, 0.0, 0.6])),
            frequency_penalty=float(generator.choice([0.0, 0.0, -0.4])),
            logit_bias={vocab // 2: 2.5, vocab - 1: -3.0} if generator.random() < 0.3 else {},
            min_tokens=9000 if vocab > 9 and generator.random() < 0.2 else 0,
            seed=int(generator.integers(-(2**63), 2**63 - 1)),
        )
        prompt, output = generator.integers(0, vocab, 9).tolist(), generator.integers(0, vocab, 30).tolist()
        rows.append(
            SampleRow(
                params=params,
                choice_index=int(generator.integers(0, 128)),
                tokens=array("q", prompt + output[: int(generator.integers(0, 30))]),
                num_prompt=9,
                stop_ids=frozenset(generator.integers(0, vocab, 4).tolist()),
            )
        )
    logits = normal(len(rows), vocab, seed=vocab)
    logits[::3] /= 30
    check(logits.round(decimals=2), rows)


def test_greedy_takes_the_largest_logit_and_of_equal_ones_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-0.0, 0.0, -1.0, -0.0]])
    assert tokens(logits, [row(GREEDY), row(GREEDY)]) == [1, 0]


TRUNCATIONS = [
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.999, temperature=1.7),
    SamplingParams(top_p=0.9, top_k=60),
    SamplingParams(top_p=0.5, top_k=3),
    SamplingParams(top_p=0.0),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.9, min_p=0.3),
    SamplingParams(min_p=0.01),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=700, temperature=0.7),
    SamplingParams(top_k=700, min_p=0.001, top_p=0.99),
    SamplingParams(top_k=5000, top_p=0.7, temperature=0.05),
]


#: Fewer in the interpreter, where a row takes a fifth of a second.
FEW_TRUNCATIONS = TRUNCATIONS if HAS_GPU else [TRUNCATIONS[index] for index in (1, 2, 6, 11)]


def test_truncation_keeps_the_tokens_of_its_definition() -> None:
    # Rounded, so that many logits are equal at every threshold.
    logits = normal(len(TRUNCATIONS), 1000, seed=1, scale=1.0).round(decimals=1)
    check_kept(logits, [row(params) for params in TRUNCATIONS])


@pytest.mark.parametrize("scale", [0.0, 0.01, 4.0, 30.0])
def test_truncation_is_exact_for_flat_and_for_steep_logits(scale: float) -> None:
    logits = normal(len(FEW_TRUNCATIONS), 1000, seed=2, scale=scale)
    check_kept(logits, [row(params) for params in FEW_TRUNCATIONS])


def test_truncation_spans_blocks_of_the_vocabulary() -> None:
    params = [SamplingParams(top_k=4500), SamplingParams(top_p=0.99, top_k=8000), SamplingParams(top_p=0.6)]
    logits = normal(len(params), 9001, seed=3, scale=2.0).round(decimals=1)
    check_kept(logits, [row(each) for each in params])
    check(logits, [row(each) for each in params])


def test_tokens_beyond_the_limit_are_not_sampled_in_any_block() -> None:
    # All logits are equal, and the first 3000 tokens are kept.
    rows = [row(SamplingParams(top_k=3000), position=position) for position in range(8)]
    sampled = tokens(torch.zeros(1, 5000), rows, [0] * len(rows))
    assert sampled == reference_tokens(torch.zeros(1, 5000), rows, [0] * len(rows))
    assert max(sampled) < 3000


def test_top_p_cuts_exactly_where_its_mass_is_reached() -> None:
    halves = [SamplingParams(top_p=0.5 + difference) for difference in (0.0, 1e-10, -1e-10)]
    described = sample_rows([row(params) for params in halves], [0, 0, 0])
    assert sample(torch.zeros(1, 2, device=DEVICE), described).num_ties.tolist() == [1, 2, 1]


def test_truncation_is_exact_where_float32_cannot_divide_logits_by_the_temperature() -> None:
    logits = torch.tensor([[3e-42, 2e-42, 1e-42, 0.0]]).repeat(3, 1)
    check_kept(logits, [row(SamplingParams(temperature=1e-42, top_p=top_p)) for top_p in (0.5, 0.8, 0.9)])


@pytest.mark.parametrize("params", [SamplingParams(), *FEW_TRUNCATIONS, SamplingParams(min_p=1.0)])
def test_special_logits_are_sampled_as_by_the_reference(params: SamplingParams) -> None:
    inf = math.inf
    special = torch.tensor(
        [
            [-0.0, 0.0, -0.0, 0.0, -0.0],
            [-inf, -inf, 1.0, -inf, -inf],
            [-inf, 1.0, 1.0, 0.0, -inf],
            [3e38, -3e38, 3e38, 0.0, 1e-45],
            [1e-45, 0.0, -1e-45, 1e-40, -1e-40],
            [-1e30, -1e30, -2e30, -3e30, -inf],
            [NAN, 1.0, 2.0, 3.0, 4.0],
            [0.0, 1.0, 2.0, 3.0, NAN],
            [0.0, inf, 2.0, 3.0, 0.0],
            [-inf, -inf, -inf, -inf, -inf],
        ]
    )
    check(special, [row(dataclasses.replace(params, seed=index), position=2) for index in range(len(special))])


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-12, 1e12, 1e300])
def test_extreme_temperatures_match_the_reference(temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.001, 0.0, 1.0009999, 1.001]]).repeat(4, 1)
    limits = ((1.0, 0), (0.9, 0), (1.0, 3), (0.5, 4))
    check(logits, [row(SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)) for top_p, top_k in limits])


def test_a_row_fails_if_its_edits_leave_no_finite_logit() -> None:
    banned = SampleRow(
        params=SamplingParams(min_tokens=5),
        choice_index=0,
        tokens=array("q", [0]),
        num_prompt=1,
        stop_ids=frozenset({0, 1}),
    )
    overflow = row(SamplingParams(logit_bias={0: 3e38}))
    assert tokens(torch.tensor([[0.0, 1.0], [3e38, 0.0], [0.0, 9.0]]), [banned, overflow, row(GREEDY)]) == [-1, -1, 1]


def test_a_row_gets_the_same_token_alone_and_in_a_batch() -> None:
    rows = [
        row(dataclasses.replace(params, seed=index, presence_penalty=0.3 * (index % 2)), output=[5, 6, 5])
        for index, params in enumerate((*FEW_TRUNCATIONS, GREEDY, SamplingParams()))
    ]
    logits = normal(len(rows), 400, seed=5)
    together = tokens(logits, rows)
    assert together == [tokens(logits[index : index + 1], [each])[0] for index, each in enumerate(rows)]
    backwards = list(range(len(rows)))[::-1]
    assert together[::-1] == tokens(logits, [rows[index] for index in backwards], backwards)


def test_rows_can_share_one_row_of_logits() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert tokens(logits, [row(GREEDY), row(GREEDY, choice=1), row(GREEDY)], [1, 1, 0]) == [0, 0, 1]


def test_an_unused_row_gets_no_token_and_no_rows_give_an_empty_result() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    params = SamplingParams(temperature=0.0, logprobs=1, logit_bias={0: 3.0})
    sampled = sample(logits.to(DEVICE), sample_rows([row(params), row(params)], [-1, 0]), max_logprobs=2)
    assert sampled.token_ids.tolist() == [-1, 0]
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids.tolist() == [[-1, -1], [1, -1]]
    nothing = sample(logits.to(DEVICE), sample_rows([], []), max_logprobs=2)
    assert nothing.token_ids.shape == (0,)
    assert nothing.logprobs is not None
    assert nothing.logprobs.top_ids.shape == (0, 2)


def test_logits_may_be_rows_of_a_wider_tensor() -> None:
    wide = normal(6, 300, seed=8)
    rows = [row(SamplingParams(seed=index, top_p=0.9, logit_bias={3: 1.0})) for index in range(3)]
    view = wide.to(DEVICE)[::2, :257]
    sampled = sample(view, sample_rows(rows, [0, 1, 2]))
    assert sampled.token_ids.tolist() == reference_tokens(wide[::2, :257].contiguous(), rows)


def test_rows_without_edits_sample_the_same_with_has_edits_off() -> None:
    rows = [row(dataclasses.replace(params, seed=index)) for index, params in enumerate(FEW_TRUNCATIONS)]
    logits = normal(len(rows), 300, seed=9)
    described = sample_rows(rows, list(range(len(rows))))
    plain = sample(logits.to(DEVICE), described, has_edits=False)
    assert plain.token_ids.tolist() == sample(logits.to(DEVICE), described).token_ids.tolist()


class TestOnAGpu:
    """CUDA graphs, which the interpreter does not have."""

    pytestmark = gpu_only

    def test_sampling_is_captured_in_a_graph_and_replayed_with_other_logits(self) -> None:
        vocab = 128_256
        rows = [
            row(dataclasses.replace(params, seed=index, presence_penalty=0.3 * (index % 2), logprobs=3), output=[5, 6])
            for index, params in enumerate((*TRUNCATIONS, GREEDY, SamplingParams()))
        ]
        described = sample_rows(rows, list(range(len(rows))))
        logits = normal(len(rows), vocab, seed=1).to(DEVICE)
        # Compiles the kernels.
        sample(logits, described, max_logprobs=5)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampled = sample(logits, described, max_logprobs=5)
        for seed in (2, 3):
            other = normal(len(rows), vocab, seed=seed)
            logits.copy_(other)
            graph.replay()
            assert sampled.token_ids.tolist() == reference_tokens(other, rows)
