"""A device that this machine lacks, or that cannot do what is asked of it, is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer.transport import open_transport
from pdserve.base.errors import SetupError
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.device import open_device, require_handover_memory

HAS_GPU = torch.cuda.is_available()


def test_the_cpu_is_always_there() -> None:
    assert open_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "needle"),
    [
        ("gpu", "--device gpu is not a device. Use cpu, cuda or, for example, cuda:1"),
        ("mps", "--device mps is not supported. Use cpu or cuda"),
        pytest.param("cuda", "needs a GPU", marks=pytest.mark.skipif(HAS_GPU, reason="there is one")),
        pytest.param(
            "cuda:99",
            "needs cuda:99, but this machine has",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")],
        ),
    ],
)
def test_an_unavailable_device_is_refused(name: str, needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        open_device(name)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"device": "cpu"}, "--device cuda."),
        ({"device": "cuda:1", "tensor_parallel_size": 2}, "--tensor-parallel-size 1."),
        ({"device": "cpu", "tensor_parallel_size": 2}, "--device cuda, --tensor-parallel-size 1."),
    ],
)
def test_keeping_blocks_on_a_gpu_is_refused_without_its_prerequisites(changes: dict[str, Any], missing: str) -> None:
    config = WorkerConfig(model="m", redis_url="", handover_memory="device", **changes)
    with pytest.raises(SetupError, match=f"--handover-memory device needs {missing} Leave it out"):
        require_handover_memory(config)
    require_handover_memory(replace(config, handover_memory="host"))


@pytest.mark.parametrize("transport", ["ucx", "nccl"])
def test_blocks_may_stay_on_a_gpu_with_either_transport(transport: str) -> None:
    config = WorkerConfig(model="m", redis_url="", handover_memory="device", device="cuda:1", transport=transport)
    require_handover_memory(config)


def test_memory_that_other_processes_cannot_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    config = WorkerConfig(model="m", redis_url="", handover_memory="device", device="cuda")
    with pytest.raises(SetupError, match="cannot be combined with expandable_segments in PYTORCH_CUDA_ALLOC_CONF"):
        require_handover_memory(config)
    require_handover_memory(replace(config, transport="nccl"))


@pytest.mark.skipif(HAS_GPU, reason="UCX may have CUDA here")
async def test_ucx_without_cuda_is_refused_at_start() -> None:
    transport = open_transport("ucx", device="cuda")
    with pytest.raises(SetupError, match=r"This UCX has no CUDA here. Use --handover-memory host\."):
        await transport.listen()
    await transport.close()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch has NCCL here")
def test_torch_without_nccl_is_refused_at_start() -> None:
    with pytest.raises(SetupError, match=r"'nccl' needs a library that is not installed .*ProcessGroupNCCL"):
        open_transport("nccl", device="cuda")
