"""Decides what `pdserve up` runs on this machine and what it refuses. Pure: the machine is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.base.model_names import models_by_alias, models_by_name
from pdserve.cli.byte_sizes import binary_size
from pdserve.cli.placement import (
    MIN_KV_BYTES,
    CoreShare,
    GpuShare,
    Hardware,
    gpus_of_both_tiers,
    kv_bytes_per_worker,
    lend_cores,
    ranks_share_gpus,
    share_cores,
    share_gpus,
)
from pdserve.cli.supervisor.spec import ProcessSpec
from pdserve.cli.up_config import UpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model on disk that every process can load."""

    path: Path
    served_name: str
    #: Memory of the weights in each worker; 0: they are shared, or on GPUs.
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisPlan:
    """URL of Redis, and the process to start for it (None: the user runs it)."""

    url: str
    spec: ProcessSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """Surroundings of one run of `pdserve up`."""

    hardware: Hardware
    hostname: str
    #: Private to this run; gone when it ends.
    run_dir: Path
    log_dir: Path
    #: Environment variables of all processes.
    variables: Mapping[str, str]
    #: Interpreter options, such as `-P`, of all Python processes.
    python_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Everything that is decided before the first worker starts."""

    config: UpConfig
    #: Each with the name that clients use.
    models: Sequence[PreparedModel]
    redis_url: str
    log_dir: Path
    #: One per worker: prefill first, then decode.
    shares: Sequence[CoreShare]
    #: Size of each worker's KV cache; None: each worker sizes its own.
    kv_cache_bytes: int | None
    #: File in which workers publish which cores are idle.
    core_leases: Path
    #: Prefix of worker ids that distinguishes this cluster from others in a shared Redis.
    id_prefix: str
    environment: Mapping[str, str]
    #: One per worker when they compute on GPUs, else empty.
    gpus: Sequence[GpuShare] = ()
    #: Interpreter options, such as `-P`, of all services.
    python_flags: tuple[str, ...] = ()

    @property
    def workers(self) -> list[PlannedWorker]:
        """All workers, in the order of `shares`. Numbers of a tier go on from one model to the next."""
        tiers = (("prefill", self.config.prefill_per_model), ("decode", self.config.decode))
        return [
            PlannedWorker(name=f"{tier}-{index * count + number}", tier=tier, model=model)
            for tier, count in tiers
            for index, model in enumerate(self.models)
            for number in range(count)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """A worker by its name in this cluster."""

    name: str
    tier: str
    model: PreparedModel


def make_plan(config: UpConfig, models: Sequence[PreparedModel], redis: RedisPlan, run: RunEnvironment) -> ClusterPlan:
    """Divides the machine among the workers.

    Raises `SetupError` when GPUs or memory are too small, and for names that do not fit.
    """
    models = _named(config, models)
    require_memory(config, [model.weight_bytes for model in models], run.hardware.free_memory_bytes)
    shares = share_cores(
        run.hardware.cores,
        num_prefill=config.num_prefill,
        num_decode=config.num_decode,
        threads_per_worker=config.threads_per_worker,
    )
    gpus = gpu_shares(config, run.hardware.num_gpus)
    kv_bytes = config.kv_cache_memory
    if not gpus and kv_bytes is None:
        weight_bytes = (config.prefill_per_model + config.decode) * sum(model.weight_bytes for model in models)
        kv_bytes = kv_bytes_per_worker(run.hardware.free_memory_bytes, config.num_workers, weight_bytes)
    return ClusterPlan(
        config=config,
        models=models,
        redis_url=redis.url,
        log_dir=run.log_dir,
        shares=lend_cores(shares) if can_lend(config) else shares,
        gpus=gpus,
        kv_cache_bytes=kv_bytes,
        core_leases=run.run_dir / "cores",
        id_prefix="" if redis.spec is not None else f"{run.hostname}-{config.port}-",
        environment=run.variables,
        python_flags=run.python_flags,
    )


def _named(config: UpConfig, models: Sequence[PreparedModel]) -> list[PreparedModel]:
    """The models with the names that clients use. Raises `SetupError` for names that do not fit."""
    own = [model.served_name for model in models]
    names = models_by_name([model.path for model in models], config.served_model_name or own)
    models_by_alias(config.alias, names)
    return [replace(model, served_name=name) for model, name in zip(models, names, strict=True)]


def require_memory(config: UpConfig, weight_bytes: Sequence[int], free_bytes: int) -> None:
    """Raises `SetupError` when the weights and KV caches of all workers do not fit, with what would.

    `weight_bytes`: those of a worker of each model.
    """
    kv_bytes, all_weights = config.kv_cache_memory or MIN_KV_BYTES, sum(weight_bytes)
    without_kv = (config.prefill_per_model + config.decode) * all_weights
    needed = without_kv + config.num_workers * kv_bytes
    if not all_weights or needed <= free_bytes:
        return
    fewer = config.decode * all_weights + config.num_decode * kv_bytes
    if config.num_prefill and fewer <= free_bytes:
        advice = f"--prefill 0 needs {binary_size(fewer)}: decode workers then also prefill"
    elif config.kv_cache_memory and without_kv < free_bytes:
        advice = "Lower --kv-cache-memory"
    else:
        advice = "Use a smaller model, --quantization int8, or a machine with more memory"
    weights = " or ".join(map(binary_size, weight_bytes))
    raise SetupError(
        f"The workers ({config.num_workers}) need {binary_size(needed)} of memory, and {binary_size(free_bytes)} is "
        f"free: each has about {weights} of weights and {binary_size(kv_bytes)} of KV cache. {advice}."
    )


def can_lend(config: UpConfig) -> bool:
    """Whether workers lend idle cores. Threads that wait for a GPU have no use for them, and ranks cannot move."""
    return config.lend_cores and config.device == "cpu" and max(config.num_ranks.values()) == 1


def gpu_shares(config: UpConfig, num_gpus: int) -> list[GpuShare]:
    """Each worker's share of the GPUs; empty when workers compute on the CPU. Raises `SetupError` for too few GPUs."""
    if config.device == "cpu":
        return []
    num_ranks = [config.num_ranks["prefill"]] * config.num_prefill + [config.num_ranks["decode"]] * config.num_decode
    if config.device == "cuda":
        return share_gpus(num_gpus, num_ranks=num_ranks, utilization=config.gpu_memory_utilization)
    memory = int(100 * config.gpu_memory_utilization / config.num_workers) / 100
    shares = [GpuShare(device=config.device, memory=memory, num_ranks=size) for size in num_ranks]
    largest = max(shares, key=lambda share: share.num_ranks)
    # A worker with a single GPU checks for it by itself, and its answer is the more precise one.
    if largest.num_ranks > 1 and largest.gpus.stop > num_gpus:
        raise SetupError(
            f"--device {config.device} and --tensor-parallel-size {largest.num_ranks} need cuda:{largest.gpus.start} "
            f"to cuda:{largest.gpus.stop - 1}, but this machine has {num_gpus} GPUs. "
            "Use fewer ranks, or a lower --device."
        )
    return shares


def for_one_gpu(config: UpConfig, num_gpus: int) -> UpConfig:
    """Without --prefill, the settings without prefill workers where all workers would share one GPU.

    Prompts and decoding compete for a GPU wherever they run, and the handover comes on top: on an H200, 64 requests at
    once got 1,263 tokens/s from a worker of each tier, and 1,702 from a single one.
    """
    shares_one = config.device.startswith("cuda") and (config.device != "cuda" or num_gpus == 1)
    return replace(config, prefill=0) if config.prefill is None and shares_one else config


def require_separate_gpus(config: UpConfig, num_gpus: int) -> None:
    """Raises `SetupError` where NCCL would have to connect two processes on one GPU, which it cannot."""
    if config.transport != "nccl" or config.handover_memory != "device":
        return
    if shared := gpus_of_both_tiers(gpu_shares(config, num_gpus), config.num_prefill):
        names = " and ".join(f"cuda:{gpu}" for gpu in shared)
        raise SetupError(
            f"--transport nccl with --handover-memory device needs prefill and decode workers on different GPUs. "
            f"With --device {config.device}, --prefill {config.prefill_per_model} and --decode {config.decode}, "
            f"both tiers use {names}. "
            "Use --transport ucx, or --device cuda with no more workers than GPUs."
        )


def plan_warnings(config: UpConfig, gpus: Sequence[GpuShare]) -> list[str]:
    """One line about each setting that is legal but rarely intended."""
    lines = []
    if ranks_share_gpus(gpus):
        lines.append(
            "Workers of several ranks share GPUs. This is slow: a rank keeps its GPU busy while it waits for another "
            "rank, which waits for that GPU. Give every worker its own GPUs."
        )
    if len(set(config.num_ranks.values())) > 1:
        sizes = ", ".join(f"{tier} {size}" for tier, size in config.num_ranks.items())
        lines.append(
            f"The tiers have different numbers of ranks ({sizes}). The last bits of an answer may then depend on which "
            "tier computed its prompt; see docs/exactness.md."
        )
    return lines
