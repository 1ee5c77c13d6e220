"""Threads that lose their core during a pass: others redo their units, and no bit of the results changes."""

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
#: Threads of a decoder. They share a CPU, so only one of them runs at a time.
NUM_THREADS = 6


@pytest.fixture(scope="module", autouse=True)
def torch_computes_alone() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def on_one_cpu(dtype: torch.dtype, quantization: str | None) -> Decoder:
    """A decoder whose threads are pinned to one CPU, so that the system interrupts each of them within its work."""
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    options = native(INSTRUCTION_SETS[0], quantization=quantization, num_threads=NUM_THREADS)
    return make_decoder(FIELDS, replace(options, cpus=(cpu,) * NUM_THREADS), dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 32])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "int8")]
)
def test_units_of_interrupted_threads_are_redone_with_the_same_bits(
    dtype: torch.dtype, quantization: str | None, rows: int
) -> None:
    texts = [random_text(number, 24, 1031) for number in range(rows)]
    plan = [[(number, 1) for number in range(rows)]] * 24
    alone = make_decoder(FIELDS, native(INSTRUCTION_SETS[0], quantization=quantization), dtype)
    assert_same_bits(
        compute(on_one_cpu(dtype, quantization), texts, plan, PLACEMENT), compute(alone, texts, plan, PLACEMENT)
    )


def test_redone_units_are_counted() -> None:
    decoder = on_one_cpu(torch.bfloat16, None)
    counters = decoder.thread_counters
    assert counters is not None
    for seed in range(1000):
        compute(decoder, [random_text(seed, 24, 1031)], [[(0, 1)]] * 24, PLACEMENT)
        if counters.redone_units > 0:
            return
    pytest.fail("no thread was ever interrupted within a unit")
