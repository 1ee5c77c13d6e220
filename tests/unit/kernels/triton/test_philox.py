"""Random words bit for bit, and the noise of both tails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.devices import DEVICE, needs_triton

# isort: split
from kernels.triton.philox import GUMBEL32_MARGIN, gumbel32, gumbel64, word_of_id, words_of_ids
from pdserve.engine.philox import GumbelNoise, gumbel

pytestmark = needs_triton


@triton.jit
def _words_kernel(out_ptr, seed, choice, position, first_id, single: tl.constexpr, block: tl.constexpr):
    offsets = tl.arange(0, block)
    words = words_of_ids(seed, choice, position, first_id, block)
    if single:
        words = word_of_id(seed, choice, position, first_id + offsets)
    tl.store(out_ptr + offsets, words.to(tl.int64))


@triton.jit
def _gumbel_kernel(words_ptr, double_ptr, single_ptr, block: tl.constexpr):
    offsets = tl.arange(0, block)
    words = tl.load(words_ptr + offsets).to(tl.uint32)
    tl.store(double_ptr + offsets, gumbel64(words))
    tl.store(single_ptr + offsets, gumbel32(words))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("seed", "choice", "position", "first_id"),
    [(0, 0, 0, 0), (5, 0, 9, 128), (-(2**63), 127, 1, 0), (2**63 - 1, 3, 131071, 151_936), (-2, 1, 2**31 - 1, 4)],
)
def test_words_match_the_reference(seed: int, choice: int, position: int, first_id: int, single: bool) -> None:
    out = torch.empty(64, dtype=torch.int64, device=DEVICE)
    _words_kernel[(1,)](out, seed, choice, position, first_id, single=single, block=64)
    expected = GumbelNoise(seed, choice, position).words_of_vocabulary(first_id + 64)[first_id:]
    assert out.tolist() == expected.tolist()


def _noise(words: list[int]) -> tuple[Tensor, Tensor]:
    single = torch.empty(len(words), dtype=torch.float32, device=DEVICE)
    double = torch.empty(len(words), dtype=torch.float64, device=DEVICE)
    _gumbel_kernel[(1,)](torch.tensor(words, device=DEVICE), double, single, block=len(words))
    return double.cpu(), single.cpu()


def test_noise_matches_the_reference_in_both_tails() -> None:
    generator = np.random.default_rng(1)
    edges = [1 << bit for bit in range(32)]
    words = [*edges, *(2**32 - edge for edge in edges), 0, *generator.integers(0, 2**32, 446).tolist()]
    words += (2**32 - generator.integers(1, 2**28, 512)).tolist()
    assert len(words) == 1024 - 1
    double, single = _noise([*words, 2**32 - 1])
    expected = torch.from_numpy(gumbel(np.array([*words, 2**32 - 1], np.uint64)))
    torch.testing.assert_close(double, expected, rtol=1e-12, atol=1e-14)
    assert (single.double() - expected).abs().max() < GUMBEL32_MARGIN.value / 10
