"""Threads that lose their core in the middle of a pass: others make what they had begun, and every bit stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pdserve.model.decoder import Decoder
from tests.property.model.plans import Placement, compute, random_text
from tests.property.model.same import assert_same_bits
from tests.property.model.tiny_models import Fields, make_decoder
from tests.support.backends import INSTRUCTION_SETS, native

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels")

PLACEMENT = Placement()
FIELDS: Fields = {
    "model_type": "qwen3",
    "vocab_size": 1031,
    "hidden_size": 192,
    "intermediate_size": 514,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
#: On the CPU they share, no more than one of them is running at any time.
NUM_THREADS = 6


@pytest.fixture(scope="module", autouse=True)
def torch_computes_alone() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


def crowded(dtype: torch.dtype, quantization: str | None) -> Decoder:
    """One whose threads are all bound to the same CPU, so that the system stops each of them somewhere in its work."""
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    options = native(INSTRUCTION_SETS[0], quantization=quantization, num_threads=NUM_THREADS)
    return make_decoder(FIELDS, replace(options, cpus=(cpu,) * NUM_THREADS), dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 32])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "int8")]
)
def test_what_late_threads_had_begun_is_made_once_and_right(
    dtype: torch.dtype, quantization: str | None, rows: int
) -> None:
    texts = [random_text(number, 24, 1031) for number in range(rows)]
    plan = [[(number, 1) for number in range(rows)]] * 24
    alone = make_decoder(FIELDS, native(INSTRUCTION_SETS[0], quantization=quantization), dtype)
    assert_same_bits(
        compute(crowded(dtype, quantization), texts, plan, PLACEMENT), compute(alone, texts, plan, PLACEMENT)
    )


def test_what_is_made_again_is_counted() -> None:
    decoder = crowded(torch.bfloat16, None)
    counters = decoder.thread_counters
    assert counters is not None
    for seed in range(1000):
        compute(decoder, [random_text(seed, 24, 1031)], [[(0, 1)]] * 24, PLACEMENT)
        if counters.redone_units > 0:
            return
    pytest.fail("no thread was ever late")
