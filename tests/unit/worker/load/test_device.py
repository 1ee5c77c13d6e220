"""Devices that are not there are refused by name, and what a model needs is measured by running its largest step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.triton.sample_rows import MAX_ROWS
from kvtransfer.transport import open_transport
from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.model.batch import Batch
from pdserve.model.loader import load_decoder
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.device import LargestSteps, measure_use, open_device, require_handover_memory
from tests.unit.model.tiny import save_model

HAS_GPU = torch.cuda.is_available()


class Counted:
    """A device whose allocations are the calls of a decoder: weights 700, each row of a step 10."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.watched = 0

    def total(self) -> int:
        return 100_000

    def free(self) -> int:
        return 80_000

    def allocated(self) -> int:
        return 700

    def peak(self) -> int:
        return 700 + 10 * max(self.rows[self.watched :])

    def reset_peak(self) -> None:
        self.watched = len(self.rows)


class Drawn(Sampler):
    """Remembers how many rows it was given."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def sample(self, logits: torch.Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        self.num_rows.append(len(rows))
        return super().sample(logits, rows, logits_rows)


def test_the_cpu_is_always_there() -> None:
    assert open_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "needle"),
    [
        ("gpu", "--device gpu is no device; write cpu, cuda or cuda:1"),
        ("mps", "supported: cpu and cuda"),
        pytest.param("cuda", "needs a GPU", marks=pytest.mark.skipif(HAS_GPU, reason="there is one")),
        pytest.param(
            "cuda:99", "this machine has", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
        ),
    ],
)
def test_a_device_that_cannot_be_had_is_refused(name: str, needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        open_device(name)


@pytest.mark.parametrize("replayed", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_prompts", "num_blocks"), [(40, 1, 3), (150, 3, 4)])
def test_the_largest_steps_are_run_and_their_peak_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    num_prompts: int,
    num_blocks: int,
    replayed: bool,
) -> None:
    decoder = load_decoder(save_model(tmp_path), max_model_len=64)
    memory, forward, tables = Counted(), decoder.forward, list[torch.Size]()

    def counted(batch: Batch, kv_cache: torch.Tensor) -> torch.Tensor:
        memory.rows.append(len(batch.token_ids))
        tables.append(batch.block_tables.shape)
        return forward(batch, kv_cache)

    monkeypatch.setattr(decoder, "forward", counted)
    config = decoder.config
    layout = KvLayout(
        model="m",
        dtype="float32",
        block_size=16,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    steps = LargestSteps(num_tokens=num_tokens, num_prompts=4, num_decoding=5, replayed=replayed)
    sampler = Drawn()
    use = measure_use(decoder, sampler, layout, memory, free_before=90_000, group_bytes=30, steps=steps)
    # Prompts that are no longer than one can be; as many sequences as graphs are padded to; and both.
    assert memory.rows == [num_tokens, 8, num_tokens + 5]
    assert tables == [(num_prompts, num_blocks), (8, 16), (num_prompts + 5, 4)]
    assert sampler.num_rows == [MAX_ROWS, 8, MAX_ROWS]
    assert (use.total, use.free, use.weights, use.group) == (100_000, 90_000, 700, 30)
    assert use.activations == 10 * (num_tokens + 5)
    assert use.graphs == (10 * 8 + 8 * config.vocab_size * 4 if replayed else 0)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"device": "cpu"}, "--device cuda;"),
        ({"device": "cuda:1", "tensor_parallel_size": 2}, "--tensor-parallel-size 1;"),
        ({"device": "cpu", "tensor_parallel_size": 2}, "--device cuda, --tensor-parallel-size 1;"),
    ],
)
def test_blocks_stay_on_a_gpu_only_where_all_that_takes_is_there(changes: dict[str, Any], missing: str) -> None:
    config = WorkerConfig(model="m", redis_url="", handover_memory="device", **changes)
    with pytest.raises(SetupError, match=f"--handover-memory device needs {missing} leave it out"):
        require_handover_memory(config)
    require_handover_memory(replace(config, handover_memory="host"))


@pytest.mark.parametrize("transport", ["ucx", "nccl"])
def test_blocks_may_stay_on_a_gpu(transport: str) -> None:
    config = WorkerConfig(model="m", redis_url="", handover_memory="device", device="cuda:1", transport=transport)
    require_handover_memory(config)


def test_memory_that_others_cannot_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    config = WorkerConfig(model="m", redis_url="", handover_memory="device", device="cuda")
    with pytest.raises(SetupError, match="does not go with expandable_segments in PYTORCH_CUDA_ALLOC_CONF"):
        require_handover_memory(config)
    require_handover_memory(replace(config, transport="nccl"))


@pytest.mark.skipif(HAS_GPU, reason="UCX may have CUDA here")
async def test_ucx_without_cuda_says_so_at_start() -> None:
    transport = open_transport("ucx", device="cuda")
    with pytest.raises(SetupError, match=r"This UCX has no CUDA here: use --handover-memory host\."):
        await transport.listen()
    await transport.close()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch has NCCL here")
def test_torch_without_nccl_says_so_at_start() -> None:
    with pytest.raises(SetupError, match=r"'nccl' needs a library that is not installed .*ProcessGroupNCCL"):
        open_transport("nccl", device="cuda")
