"""The cores a worker computes on: its own, and those of other workers that it may borrow."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.core_leases import MAX_CPUS, CoreLeases


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_cpus(config: WorkerConfig) -> None:
    """Threads of kernels are pinned one by one, where a core that is not to be had would go unnoticed.

    Raises `SetupError`.
    """
    for flag, cpus in (("--cpus", config.cpus), ("--borrow-cpus", config.borrow_cpus)):
        usable = os.sched_getaffinity(0) if cpus and hasattr(os, "sched_getaffinity") else set(cpus)
        if missing := sorted(set(cpus) - usable):
            raise SetupError(
                f"{flag} names cores {missing} that this process may not use; it may use {sorted(usable)}."
            )
    if config.borrow_cpus and not (config.core_leases and config.cpus):
        raise SetupError("--borrow-cpus needs --cpus, what the worker has itself, and --core-leases.")
    if config.core_leases and not config.cpus:
        raise SetupError("--core-leases needs --cpus: only cores that are a worker's own can be lent.")
    if common := sorted(set(config.cpus) & set(config.borrow_cpus)):
        raise SetupError(f"--borrow-cpus names cores {common} that are this worker's own.")


def open_core_leases(config: WorkerConfig) -> CoreLeases | None:
    """The file in which workers lend each other their cores; None: this one keeps to itself. Raises `SetupError`."""
    if config.core_leases is None or not config.cpus:
        return None
    if max(config.cpus + config.borrow_cpus) >= MAX_CPUS:
        raise SetupError(f"--core-leases has room for cores below {MAX_CPUS}.")
    try:
        return CoreLeases(Path(config.core_leases), config.cpus)
    except OSError as error:
        raise SetupError(f"Cannot use --core-leases {config.core_leases}: {error.strerror}.") from error
