"""Several ranks, each a process with a shard of the weights, compute the same as one process, within rounding.

Bits differ, because ranks round their partial sums. The tolerance is the error of another order of sums.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.golden.paged import generate_greedily
from tests.property.model import rank_processes as processes
from tests.property.model.plans import Computed, compute
from tests.property.model.same import assert_close
from tests.property.model.tiny_models import make_decoder
from tests.support.backends import REFERENCE
from tests.support.devices import needs_triton

SIZES = (2, 3, 4)
#: Tolerances as shares of the largest value: the error between two orders of sums on one rank.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 0.03}
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The results of each of `size` ranks."""

    size: int
    results: list[dict[str, Tensor]]

    def computed(self, name: str, num_texts: int) -> list[Computed]:
        """Rank 0's logits, and the KV of all ranks, concatenated along the heads."""
        texts = []
        for index in range(num_texts):
            logits, positions = (self.results[0][f"{name}/{index}/{what}"] for what in ("logits", "positions"))
            kv = torch.cat([result[f"{name}/{index}/kv"] for result in self.results], 2)
            texts.append(Computed(dict(zip(positions.tolist(), logits, strict=True)), kv))
        return texts


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All results of ranks, computed in one run, because starting them takes most of the time."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", processes.__name__, str(directory), *map(str, SIZES)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=100)
    return directory


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, directory: Path) -> Ranks:
    size: int = request.param
    return Ranks(size, [load_file(directory / f"{size}-{rank}.safetensors") for rank in range(size)])


@pytest.fixture(scope="module", autouse=True)
def torch_computes_alone() -> Iterator[None]:
    """One thread for torch, as in the ranks."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", processes.FAMILIES)
def test_logits_and_kv_of_ranks_are_those_of_one_process(ranks: Ranks, family: str, dtype: torch.dtype) -> None:
    one = make_decoder(processes.fields_of(family, ranks.size), REFERENCE, dtype)
    ours = ranks.computed(f"{family}/{dtype}", len(processes.TEXTS))
    assert_close(ours, compute(one, processes.TEXTS, processes.PLAN, processes.PLACEMENT), TOLERANCE[dtype])


@pytest.mark.parametrize("ranks", processes.GREEDY_SIZES, indirect=True)
@pytest.mark.parametrize("family", processes.FAMILIES)
def test_greedy_tokens_are_those_of_one_process(ranks: Ranks, family: str) -> None:
    one = make_decoder(processes.fields_of(family, ranks.size), REFERENCE, torch.float32)
    tokens, _ = generate_greedily(one, processes.PROMPTS, processes.GREEDY_TOKENS, chunk=8)
    assert ranks.results[0][f"{family}/tokens"].tolist() == tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_reduce_adds_in_order_of_ranks_in_float32_and_rounds_once(ranks: Ranks, dtype: torch.dtype) -> None:
    total = torch.zeros(processes.SUM_ROWS, processes.SUM_WIDTH)
    for rank in range(ranks.size):
        total += processes.addends(rank, dtype).float()
    for result in ranks.results:
        assert torch.equal(result[f"sum/{dtype}"], total.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_reduce_of_a_row_does_not_depend_on_other_rows(ranks: Ranks, dtype: torch.dtype) -> None:
    for result in ranks.results:
        assert torch.equal(result[f"sum/{dtype}"][processes.SINGLE_ROWS], result[f"sums of rows/{dtype}"])


@needs_triton
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_two_ranks_with_triton_compute_the_same_as_one_process(ranks: Ranks) -> None:
    one = make_decoder(processes.fields_of("llama", 2), REFERENCE, torch.float32)
    expected = compute(one, processes.TRITON_TEXTS, processes.TRITON_PLAN, processes.PLACEMENT)
    assert_close(ranks.computed("triton", 1), expected, TOLERANCE[torch.float32])
