"""Divides a machine's cores, memory and GPUs among the workers of `pdserve up`: pure, the machine is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.base.errors import SetupError

_MIB = 1024**2
_MAX_KV_BYTES = 2 * 1024**3
_KV_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """What this process may use: core numbers, and how many of them at a time (fewer under a CPU quota)."""

    ids: tuple[int, ...]
    usable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """One worker's part: number of compute threads, and the cores they are pinned to (none: the system decides)."""

    threads: int
    cpus: tuple[int, ...] = ()
    #: Cores of other workers to compute on while those are idle, the preferred first.
    borrow_cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """One worker's GPU, as torch names it, and the share of its memory that is the worker's."""

    device: str
    memory: float
    #: The worker has this GPU and the next ones, one for each rank.
    num_ranks: int = 1

    @property
    def gpus(self) -> range:
        """The numbers of all its GPUs."""
        first = int(self.device.partition(":")[2] or 0)
        return range(first, first + self.num_ranks)

    def __str__(self) -> str:
        ranks = "" if self.num_ranks == 1 else f" and the next {self.num_ranks - 1}"
        return f"{self.memory:.0%} of {self.device}{ranks}"


def share_gpus(num_gpus: int, *, num_ranks: Sequence[int], utilization: float) -> list[GpuShare]:
    """The workers take turns, prefill first, each with as many neighbouring GPUs as it has ranks.

    Those that meet on a GPU share its memory evenly, in whole percents; a worker has the same share of all its GPUs.
    Raises `SetupError` for one with more ranks than there are GPUs.
    """
    users = [0] * num_gpus
    places: list[range] = []
    for size in num_ranks:
        if size > num_gpus:
            raise SetupError(f"--tensor-parallel-size {size} needs as many GPUs, and this machine has {num_gpus}.")
        after = places[-1].stop if places else 0
        first = after if after + size <= num_gpus else 0
        places.append(range(first, first + size))
        for gpu in places[-1]:
            users[gpu] += 1
    return [
        GpuShare(
            device=f"cuda:{place.start}",
            memory=int(100 * utilization / max(users[gpu] for gpu in place)) / 100,
            num_ranks=len(place),
        )
        for place in places
    ]


def ranks_share_gpus(shares: Sequence[GpuShare]) -> bool:
    """Whether a worker of several ranks has a GPU that another worker has, too."""
    users = Counter(gpu for share in shares for gpu in share.gpus)
    return any(share.num_ranks > 1 and users[gpu] > 1 for share in shares for gpu in share.gpus)


def gpus_of_both(shares: Sequence[GpuShare], num_prefill: int) -> list[int]:
    """GPUs that prefill workers, of which the first `num_prefill` shares are, have together with decode workers."""
    prefill, decode = (
        {gpu for share in tier for gpu in share.gpus} for tier in (shares[:num_prefill], shares[num_prefill:])
    )
    return sorted(prefill & decode)


def share_cores(cores: Cores, *, num_prefill: int, num_decode: int, threads_per_worker: int | None) -> list[CoreShare]:
    """Shares for the prefill workers, then the decode workers.

    As long as every compute thread can have a core of its own, workers are pinned to disjoint cores, so that the tiers
    do not fight; cores left over by an even division go to prefill, whose speed grows with them. When there are more
    threads than cores nobody is pinned: two workers tied to one core would wait for each other beside an idle one. Nor
    under a CPU quota, where core numbers are not ours: every container of the machine would pick the same first ones.
    """
    num_workers = num_prefill + num_decode
    if threads_per_worker is not None:
        threads = [threads_per_worker] * num_workers
    else:
        each, left_over = divmod(cores.usable, num_workers)
        threads = [max(1, each + (index < left_over)) for index in range(num_workers)]
    if sum(threads) > cores.usable or cores.usable < len(cores.ids):
        return [CoreShare(threads=count) for count in threads]
    return _pin(cores.ids, threads)


def lend_cores(shares: Sequence[CoreShare]) -> list[CoreShare]:
    """The same shares, in which every worker may borrow the cores of all others; nothing where nobody is pinned.

    Each begins with those that come after its own, so that several which look for a core ask for different ones.
    """
    everyones = [cpu for share in shares for cpu in share.cpus]
    lending = []
    first = 0
    for share in shares:
        after = first + len(share.cpus)
        lending.append(replace(share, borrow_cpus=(*everyones[after:], *everyones[:first]) if share.cpus else ()))
        first = after
    return lending


def kv_bytes_per_worker(available_bytes: int, num_workers: int) -> int:
    """A fifth of the free memory over all workers, at most 2 GiB each, in whole MiB; weights come on top.

    A machine with little memory gets little, down to 1 MiB; the worker refuses a cache without room for one block.
    """
    share = min(_MAX_KV_BYTES, int(available_bytes * _KV_SHARE / num_workers))
    return max(_MIB, share // _MIB * _MIB)


def _pin(ids: Sequence[int], threads: Sequence[int]) -> list[CoreShare]:
    shares = []
    first = 0
    for count in threads:
        shares.append(CoreShare(threads=count, cpus=tuple(ids[first : first + count])))
        first += count
    return shares
