"""The C++ sampler: rows that cannot be sampled fail alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pdserve.base.sampling import SamplingParams
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Fault, Sampled, SampleFailure
from tests.unit.engine.cpu_sampling import cpu_sampler
from tests.unit.engine.fakes import row
from tests.unit.engine.random_grammar import RandomGrammar, with_grammar
from tests.unit.kernels.cpu_ops import INSTRUCTION_SETS, needs_kernels, on_every_instruction_set

pytestmark = needs_kernels

SOUND = SamplingParams(top_p=0.9, seed=1)


def test_a_row_that_cannot_be_packed_fails_alone() -> None:
    broken = row(replace(SOUND, top_k=2**70))
    logits = torch.tensor([[0.0, 0.0, 99.0]]).repeat(4, 1)
    sampler = cpu_sampler(INSTRUCTION_SETS[0])
    first, failed, other, last = sampler.sample(logits, [row(SOUND), broken, broken, row(SOUND)], range(4))
    assert [first, last] == [Sampled(token_id=2), Sampled(token_id=2)]
    assert isinstance(failed, SampleFailure)
    assert failed.fault is Fault.PREPARATION
    assert failed == other


@on_every_instruction_set
@pytest.mark.parametrize(
    "params",
    [
        replace(SOUND, temperature=math.inf),
        replace(SOUND, temperature=math.nan),
        replace(SOUND, top_p=math.nan),
        replace(SOUND, min_p=math.nan),
        replace(SOUND, temperature=math.inf, logit_bias={0: -math.inf}),
    ],
)
def test_parameters_that_the_api_refuses_end_no_worker(isa: str, params: SamplingParams) -> None:
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(1))
    results = cpu_sampler(isa).sample(logits, [row(params), row(SOUND)], [0, 1])
    assert results[1] == Sampler().sample(logits, [row(SOUND)], [1])[0]


@on_every_instruction_set
def test_ids_beyond_the_vocabulary_are_ignored(isa: str) -> None:
    """vllm#44968: ids outside of the vocabulary changed rows of others. Fails when `is_token` takes any id."""
    params = replace(
        SOUND, temperature=0.0, logit_bias={1: 5.0, 900: 1.0}, repetition_penalty=2.0, presence_penalty=1.0
    )
    logits = torch.tensor([[4.0, 0.0, 0.0]])
    assert cpu_sampler(isa).sample(logits, [row(params, position=1, output=[10**12])], [0]) == [Sampled(token_id=0)]


@on_every_instruction_set
def test_no_id_beyond_the_vocabulary_is_sampled_however_wide_the_rows_in_memory_are(isa: str) -> None:
    """GHSA-8wr5-jm2h-8r4f: padding of the vocabulary was sampled. Fails when rows are taken for adjacent."""
    padded = torch.full((4, 128), 1e9)
    padded[:, :97] = torch.randn(4, 97, generator=torch.Generator().manual_seed(2))
    rows = [row(each, position=3) for each in (SOUND, SamplingParams(temperature=0.0), replace(SOUND, top_k=90))]
    for sampler in (cpu_sampler(isa), Sampler()):
        results = sampler.sample(padded[:, :97], rows, range(3))
        assert results == sampler.sample(padded[:, :97].contiguous(), rows, range(3))
        assert all(isinstance(result, Sampled) and result.token_id < 97 for result in results)


@on_every_instruction_set
@pytest.mark.parametrize("scale", [0.0, 1e-4, 3.0])
def test_large_vocabularies_give_the_results_of_the_sampler_in_numpy(isa: str, scale: float) -> None:
    logits = torch.randn(4, 50_001, generator=torch.Generator().manual_seed(4)) * scale
    params = [
        replace(SOUND, logprobs=20),
        replace(SOUND, top_p=0.99, temperature=2.0),
        replace(SOUND, top_k=9000, repetition_penalty=1.2),
        SamplingParams(seed=3),
    ]
    rows = [row(each, position=9) for each in params]
    assert cpu_sampler(isa, 2).sample(logits, rows, range(4)) == Sampler().sample(logits, rows, range(4))


@on_every_instruction_set
def test_logprobs_of_rows_with_a_grammar_are_those_before_its_mask(isa: str) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(5))
    free = [row(replace(SOUND, logprobs=4, logprob_token_ids=(7,)), position=index) for index in range(3)]
    held = [with_grammar(each, RandomGrammar(index, 700, 0.01)) for index, each in enumerate(free)]
    results = cpu_sampler(isa).sample(logits, held, range(3))
    assert results == Sampler().sample(logits, held, range(3))
    for result, other in zip(results, cpu_sampler(isa).sample(logits, free, range(3)), strict=True):
        assert isinstance(result, Sampled)
        assert isinstance(other, Sampled)
        assert result.token_id != other.token_id
        assert result.logprobs is not None
        assert other.logprobs is not None
        assert result.logprobs.top_ids == other.logprobs.top_ids
        assert result.logprobs.top_logprobs == other.logprobs.top_logprobs
