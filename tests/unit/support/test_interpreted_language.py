"""Kernels in Triton's interpreter: the language is patched once and stays so, which makes small kernels cheap."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices import HAS_GPU, needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(HAS_GPU, reason="kernels run on the GPU")]


def test_the_functions_of_a_launch_stay_for_the_next() -> None:
    import triton.language as tl

    from kernels.triton.activation import silu_mul

    gate, up = torch.tensor([[0.0, 50.0]]), torch.tensor([[7.0, 2.0]])
    first, load = silu_mul(gate, up), tl.load
    second = silu_mul(gate, up)
    assert tl.load is load
    assert not tl.core.is_builtin(load)
    assert torch.equal(first, torch.tensor([[0.0, 100.0]]))
    assert torch.equal(first, second)
