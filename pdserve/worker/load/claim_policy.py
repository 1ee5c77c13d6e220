"""Which cores and GPUs a worker claims of those that no other worker of the machine holds. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pdserve.base.errors import SetupError
from pdserve.observe.machine import Cores
from pdserve.worker.config import WorkerConfig


def num_to_claim(config: WorkerConfig, cores: Cores) -> int:
    """Number of cores that a worker claims: `--threads`, or an even share of the machine, rounded down.

    The share is rounded down, so that every expected worker gets the same number, in any order of arrival. Cores that
    are left over belong to no worker and are lent.
    """
    return config.threads or max(1, len(cores.ids) // config.claim_workers)


def choose_cores(free: Collection[int], cores: Sequence[int], count: int) -> tuple[int, ...]:
    """At most `count` of the free cores: neighbours in `cores` if there are enough of them, else the first ones."""
    candidates = [cpu for cpu in cores if cpu in free]
    for first in range(len(cores) - count + 1):
        neighbours = cores[first : first + count]
        if all(cpu in free for cpu in neighbours):
            return tuple(neighbours)
    return tuple(candidates[:count])


def with_cores(config: WorkerConfig, own: Sequence[int], cores: Cores, core_leases: str) -> WorkerConfig:
    """The settings of a worker that holds the cores `own`.

    It borrows any other core while no worker computes there; the cores that follow its own come first, as in
    `pdserve up`. A worker without a core of its own is one more than expected. It runs on all cores, with as many
    threads as one worker more would have cores. The system divides the cores between the threads.
    """
    if not own:
        return replace(config, threads=config.threads or max(1, len(cores.ids) // (config.claim_workers + 1)))
    if config.tensor_parallel_size > 1:
        return replace(config, cpus=tuple(own))
    after = cores.ids.index(own[-1]) + 1
    others = (*cores.ids[after:], *cores.ids[:after])
    return replace(
        config,
        cpus=tuple(own),
        threads=len(own),
        borrow_cpus=tuple(cpu for cpu in others if cpu not in own),
        core_leases=core_leases,
    )


def choose_gpus(free: Collection[int], count: int) -> range | None:
    """The first `count` neighbouring GPUs that are free; None when there are none."""
    for first in sorted(free):
        if all(first + offset in free for offset in range(count)):
            return range(first, first + count)
    return None


def require_claimable(config: WorkerConfig) -> None:
    """Raises `SetupError` for settings that a claim would have to contradict."""
    for flag, is_set in (
        ("--core-leases", config.core_leases is not None),
        ("--borrow-cpus", bool(config.borrow_cpus)),
    ):
        if is_set:
            raise SetupError(f"--claim-dir chooses what {flag} says, and both are set. Leave {flag} out.")
