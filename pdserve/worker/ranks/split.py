"""Division of a worker's cores and GPUs among its ranks. Pure."""

from __future__ import annotations

from dataclasses import replace

from kernels.split import even_slice
from pdserve.base.errors import SetupError
from pdserve.worker.config import WorkerConfig


def config_of_rank(config: WorkerConfig, rank: int, *, num_cores: int) -> WorkerConfig:
    """The worker's settings for one rank: its GPU, its share of the worker's cores and threads.

    `num_cores`: number of cores this process may use. Raises `SetupError` for settings that need a single rank.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return config
    if config.borrow_cpus or config.core_leases:
        raise SetupError(
            "--core-leases and --borrow-cpus need the C++ kernels, which support one rank only, and "
            f"--tensor-parallel-size is {size}. Leave them out, or set it to 1."
        )
    cpus = config.cpus[even_slice(len(config.cpus), rank, size)] if len(config.cpus) >= size else ()
    threads = (config.threads or len(config.cpus) or num_cores) // size
    return replace(config, device=_device(config.device, rank), cpus=cpus, threads=max(1, threads))


def _device(name: str, rank: int) -> str:
    """The rank's device: a worker's GPUs have consecutive indices."""
    kind, _, index = name.partition(":")
    return name if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"
