"""The process group of a worker's ranks: gloo between CPUs, NCCL between GPUs, all on one machine."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch._C import _distributed_c10d as c10d

from kernels.ranks import ProcessGroup, TorchRanks
from pdserve.worker.load.kv_budget import KvBudget
from pdserve.worker.load.memory_profile import CudaMemory

#: Limit for forming the group: all ranks are known to be running.
_FORMING_TIMEOUT = timedelta(seconds=60)
#: Limit of every exchange: ranks wait while another reads its weights. The end of a process is noticed at once.
_TIMEOUT = timedelta(minutes=10)


class RanksUnreachable(RuntimeError):
    """Other ranks do not answer. Shown only if none of them reports the cause."""


class FormedGroup(NamedTuple):
    """A group that all ranks have joined."""

    group: ProcessGroup
    #: GPU memory taken for sending and receiving, which torch does not count.
    device_bytes: int


def form_group(rendezvous: Path, rank: int, size: int, device: torch.device) -> FormedGroup:
    """Joins the other ranks, which are known to be running, through a file. Raises `RanksUnreachable`.

    The result is not torch's default group, of which a process can have only one.
    """
    store = c10d.FileStore(str(rendezvous), size)
    store.set_timeout(_FORMING_TIMEOUT)
    free = _free_bytes(device)
    try:
        group = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size)
        _connect(TorchRanks(group), device)
    except RuntimeError as error:
        raise RanksUnreachable(f"Rank {rank} of {size} cannot reach the other ranks: {error}") from error
    return FormedGroup(group, free - _free_bytes(device))


def _gloo(store: c10d.Store, rank: int, size: int) -> ProcessGroup:
    # Torch's type stubs lack gloo's options.
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _FORMING_TIMEOUT
    group = c10d.ProcessGroupGloo(store, rank, size, options)
    group.set_timeout(_TIMEOUT)
    return cast(ProcessGroup, group)


def _nccl(store: c10d.Store, rank: int, size: int) -> ProcessGroup:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return cast(ProcessGroup, c10d.ProcessGroupNCCL(store, rank, size, options))


def _connect(ranks: TorchRanks, device: torch.device) -> None:
    """Makes each kind of call that steps make, on which NCCL connects the ranks and allocates its buffers.

    Otherwise that would happen after minutes of loading, during which a rank may have ended.
    """
    ranks.gather_columns(ranks.all_reduce(torch.zeros((1, 1), device=device)), ranks.size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_bytes(device: torch.device) -> int:
    return CudaMemory(device).free() if device.type == "cuda" else 0


def agree(group: ProcessGroup, device: torch.device, budget: KvBudget) -> KvBudget:
    """The budget that is possible on every rank. Returns when all ranks have called it."""
    values = torch.tensor([budget.num_blocks, budget.max_model_len], device=device)
    options = c10d.AllreduceOptions()
    options.reduceOp = c10d.ReduceOp(c10d.ReduceOp.MIN)
    group.allreduce([values], options).wait()
    num_blocks, max_model_len = values.tolist()
    return KvBudget(num_blocks=num_blocks, max_model_len=max_model_len)
