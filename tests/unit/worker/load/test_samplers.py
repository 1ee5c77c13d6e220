"""The sampler of a model: the threads of the C++ decoder sample its logits, and numpy where there are none."""

from __future__ import annotations

import torch

from pdserve.base.sampling import SamplingParams
from pdserve.engine.cpu_sampler import CpuSampler
from pdserve.engine.sampler import Sampler
from pdserve.worker.load.samplers import open_sampler
from tests.property.model.plans import Placement, compute, random_text
from tests.property.model.test_late_members import FIELDS
from tests.property.model.tiny_models import make_decoder
from tests.support.backends import INSTRUCTION_SETS, REFERENCE, native
from tests.unit.engine.fakes import row
from tests.unit.kernels.cpu_ops import needs_kernels

ROWS = [
    row(SamplingParams(top_p=0.9, seed=index, logprobs=3 if index % 3 == 0 else None), position=index)
    for index in range(12)
]


@needs_kernels
def test_the_threads_of_the_decoder_sample_between_its_steps() -> None:
    decoder = make_decoder(FIELDS, native(INSTRUCTION_SETS[0], num_threads=3), torch.float32)
    sampler = open_sampler(decoder)
    assert isinstance(sampler, CpuSampler)
    texts = [random_text(number, 8, 1031) for number in range(4)]
    for seed in range(2):
        compute(decoder, texts, [[(number, 8) for number in range(4)]], Placement())
        logits = torch.randn(4, 1031, generator=torch.Generator().manual_seed(seed)) * 3
        rows = [index % 4 for index in range(len(ROWS))]
        assert sampler.sample(logits, ROWS, rows) == Sampler().sample(logits, ROWS, rows)


def test_plain_torch_is_sampled_by_numpy() -> None:
    assert isinstance(open_sampler(make_decoder(FIELDS, REFERENCE, torch.float32)), Sampler)
