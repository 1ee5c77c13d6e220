"""Divides a machine's cores, memory and GPUs among the workers of `pdserve up`. Pure: the machine is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.base.errors import SetupError
from pdserve.observe.machine import Cores

_MIB = 1024**2
#: A worker's KV cache, as far as `pdserve up` decides its size.
MIN_KV_BYTES = _MIB
_MAX_KV_BYTES = 2 * 1024**3
_KV_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Resources of this machine, or of this container."""

    cores: Cores
    num_gpus: int
    #: Memory that can be taken without swapping.
    free_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """One worker's compute threads, and the cores they are pinned to (empty: the system decides)."""

    threads: int
    cpus: tuple[int, ...] = ()
    #: Cores of other workers to compute on while those are idle, preferred ones first.
    borrow_cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """One worker's GPU, as torch names it, and the worker's share of its memory."""

    device: str
    memory: float
    #: Rank i uses the i-th GPU from `device` on.
    num_ranks: int = 1

    @property
    def gpus(self) -> range:
        """Numbers of all GPUs of the worker."""
        first = int(self.device.partition(":")[2] or 0)
        return range(first, first + self.num_ranks)

    def __str__(self) -> str:
        ranks = "" if self.num_ranks == 1 else f" and the next {self.num_ranks - 1}"
        return f"{self.memory:.0%} of {self.device}{ranks}"


def share_gpus(num_gpus: int, *, num_ranks: Sequence[int], utilization: float) -> list[GpuShare]:
    """Assigns GPUs round-robin, prefill workers first, to each worker as many neighbouring GPUs as it has ranks.

    Workers on the same GPU share its memory evenly, in whole percents. A worker has the same share of all its GPUs.
    Raises `SetupError` for a worker with more ranks than there are GPUs.
    """
    users = [0] * num_gpus
    assigned: list[range] = []
    for size in num_ranks:
        if size > num_gpus:
            raise SetupError(
                f"--tensor-parallel-size {size} needs {size} GPUs, but this machine has {num_gpus}. Use fewer ranks."
            )
        after = assigned[-1].stop if assigned else 0
        first = after if after + size <= num_gpus else 0
        assigned.append(range(first, first + size))
        for gpu in assigned[-1]:
            users[gpu] += 1
    return [
        GpuShare(
            device=f"cuda:{gpus.start}",
            memory=int(100 * utilization / max(users[gpu] for gpu in gpus)) / 100,
            num_ranks=len(gpus),
        )
        for gpus in assigned
    ]


def ranks_share_gpus(shares: Sequence[GpuShare]) -> bool:
    """Whether a worker of several ranks shares a GPU with another worker."""
    users = Counter(gpu for share in shares for gpu in share.gpus)
    return any(share.num_ranks > 1 and users[gpu] > 1 for share in shares for gpu in share.gpus)


def gpus_of_both_tiers(shares: Sequence[GpuShare], num_prefill: int) -> list[int]:
    """GPUs used by prefill workers, which own the first `num_prefill` shares, and by decode workers."""
    prefill, decode = (
        {gpu for share in tier for gpu in share.gpus} for tier in (shares[:num_prefill], shares[num_prefill:])
    )
    return sorted(prefill & decode)


def share_cores(cores: Cores, *, num_prefill: int, num_decode: int, threads_per_worker: int | None) -> list[CoreShare]:
    """Shares for the prefill workers, then the decode workers.

    As long as every compute thread can have its own core, workers are pinned to disjoint cores, so that the tiers do
    not compete. Cores left over by an even division go to prefill, whose speed grows with them.

    No worker is pinned when there are more threads than cores: two workers tied to one core would wait for each other
    while another core idles. Nor under a CPU quota, where core numbers are not exclusive: every container on the
    machine would pick the same first ones.
    """
    num_workers = num_prefill + num_decode
    if threads_per_worker is not None:
        threads = [threads_per_worker] * num_workers
    else:
        each, left_over = divmod(cores.usable, num_workers)
        threads = [max(1, each + (index < left_over)) for index in range(num_workers)]
    if sum(threads) > cores.usable or cores.has_quota:
        return [CoreShare(threads=count) for count in threads]
    return _pin(cores.ids, threads)


def lend_cores(shares: Sequence[CoreShare]) -> list[CoreShare]:
    """Lets every pinned worker borrow the cores of all others.

    Each worker's list starts with the cores that follow its own, so that several borrowers try different cores first.
    """
    all_cores = [cpu for share in shares for cpu in share.cpus]
    lending = []
    first = 0
    for share in shares:
        after = first + len(share.cpus)
        lending.append(replace(share, borrow_cpus=(*all_cores[after:], *all_cores[:first]) if share.cpus else ()))
        first = after
    return lending


def kv_bytes_per_worker(available_bytes: int, num_workers: int, weight_bytes: int = 0) -> int:
    """KV cache size of each worker, in whole MiB: a fifth of what all weights leave free, at most 2 GiB each.

    `weight_bytes`: of all workers together. A machine with little memory gets a small cache, down to 1 MiB; the worker
    refuses a cache that cannot hold one block.
    """
    left = max(0, available_bytes - weight_bytes)
    share = min(_MAX_KV_BYTES, int(left * _KV_SHARE / num_workers))
    return max(MIN_KV_BYTES, share // _MIB * _MIB)


def _pin(ids: Sequence[int], threads: Sequence[int]) -> list[CoreShare]:
    shares = []
    first = 0
    for count in threads:
        shares.append(CoreShare(threads=count, cpus=tuple(ids[first : first + count])))
        first += count
    return shares
