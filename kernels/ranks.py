"""Ranks that are processes, each with its own device, in a process group of torch.distributed."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from kernels.split import even_slice


class ProcessGroup(Protocol):
    """The methods used of a torch process group, which torch's stubs declare incompletely."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def _allgather_base(self, output: Tensor, shard: Tensor) -> c10d.Work: ...
    def gather(self, outputs: list[list[Tensor]], shards: list[Tensor], options: c10d.GatherOptions) -> c10d.Work: ...
    def allreduce(self, tensors: list[Tensor], options: c10d.AllreduceOptions) -> c10d.Work: ...
    def abort(self) -> None: ...


_TO_FIRST = c10d.GatherOptions()
_TO_FIRST.rootRank = 0


class TorchRanks:
    """Implements `kernels.decoder.Ranks`, with gloo on CPUs and NCCL on GPUs.

    Every rank sends its partial sums to every other rank, which adds them in the order of ranks. The libraries' own
    reductions are not used: their order of additions depends on an element's position in the message, so with three
    or more ranks a row's bits would depend on the batch. Two ranks send as much as a ring would, n ranks n / 2 times
    as much.

    Shapes alone decide what is sent, and nothing waits for the host. So with NCCL a CUDA graph can contain it, once a
    first call has connected the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """The caller makes the group and destroys it."""
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        assert x.is_contiguous()
        if x.numel() == 0:
            return x
        gathered = x.new_empty((self.size * x.shape[0], x.shape[1]))
        self._group._allgather_base(gathered, x).wait()
        first, *others = gathered.chunk(self.size)
        total = first.float()
        for partial_sum in others:
            total += partial_sum
        return x.copy_(total)

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        num_rows = x.shape[0]
        widths = [_width(num_columns, rank, self.size) for rank in range(self.size)]
        assert x.shape == (num_rows, widths[self.rank])
        if num_rows == 0:
            return x.new_empty((0, num_columns))
        # All messages have the same size. The first rank's shard is the widest, by one column at most.
        sent = torch.nn.functional.pad(x, (0, widths[0] - x.shape[1]))
        if self.rank != 0:
            self._group.gather([], [sent], _TO_FIRST).wait()
            return x
        shards = [torch.empty_like(sent) for _ in widths]
        self._group.gather([shards], [sent], _TO_FIRST).wait()
        return torch.cat([shard[:, :width] for shard, width in zip(shards, widths, strict=True)], 1)


def _width(num_columns: int, rank: int, size: int) -> int:
    columns = even_slice(num_columns, rank, size)
    return int(columns.stop - columns.start)
