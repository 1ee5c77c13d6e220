"""The cores a worker computes on: its own, and those it may borrow from other workers."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pdserve.base.errors import SetupError
from pdserve.observe.machine import available_cores
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.core_leases import MAX_CPUS, CoreLeases


def num_cores() -> int:
    """Number of cores that this process may use at a time: within its CPU quota, and within OMP_NUM_THREADS."""
    return min(available_cores().usable, torch.get_num_threads())


def require_cpus(config: WorkerConfig) -> None:
    """Raises `SetupError` for cores that cannot be used as requested.

    Kernels pin their threads one by one, which would silently ignore a core that is not available.
    """
    for flag, cpus in (("--cpus", config.cpus), ("--borrow-cpus", config.borrow_cpus)):
        usable = os.sched_getaffinity(0) if cpus and hasattr(os, "sched_getaffinity") else set(cpus)
        if missing := sorted(set(cpus) - usable):
            raise SetupError(
                f"{flag} names cores {missing}, which this process may not use. Choose from {sorted(usable)}."
            )
    if config.borrow_cpus and not (config.core_leases and config.cpus):
        raise SetupError("--borrow-cpus needs --cpus (the worker's own cores) and --core-leases. Set both.")
    if config.core_leases and not config.cpus:
        raise SetupError("--core-leases needs --cpus: a worker can lend only cores of its own. Set --cpus.")
    if common := sorted(set(config.cpus) & set(config.borrow_cpus)):
        raise SetupError(f"--borrow-cpus names cores {common}, which --cpus already gives to this worker. Remove them.")


def open_core_leases(config: WorkerConfig) -> CoreLeases | None:
    """The file through which workers lend each other cores; None when this worker lends none. Raises `SetupError`."""
    if config.core_leases is None or not config.cpus:
        return None
    highest = max(config.cpus + config.borrow_cpus)
    if highest >= MAX_CPUS:
        raise SetupError(
            f"--core-leases supports cores 0 to {MAX_CPUS - 1}, but this worker uses core {highest}. Choose lower ones."
        )
    try:
        return CoreLeases(Path(config.core_leases), config.cpus)
    except OSError as error:
        raise SetupError(
            f"Cannot use --core-leases {config.core_leases}: {error.strerror}. Name a file that can be written."
        ) from error
