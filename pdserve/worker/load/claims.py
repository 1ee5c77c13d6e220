"""What a worker claims at its start: cores or GPUs that no other worker of the machine holds.

The workers of a machine find each other through a directory that they share, also from different containers. Nobody
coordinates them. It holds the lease file `cores`, and a file `gpu-{uuid}` for each GPU that was ever claimed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from pdserve.base.errors import CapacityError, SetupError
from pdserve.base.logs import get_logger
from pdserve.net import notify
from pdserve.net.admin import Health
from pdserve.observe.machine import available_cores
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.claim_policy import num_to_claim, require_claimable, with_cores
from pdserve.worker.load.core_claims import CoreClaims
from pdserve.worker.load.cores import require_cpus
from pdserve.worker.load.gpu_claims import GpuClaims

log = get_logger(__name__)

#: A GPU that another worker gives back is taken within this time.
_CLAIM_INTERVAL_S = 1.0


async def claim_when_free(
    config: WorkerConfig, stack: AsyncExitStack, stop: asyncio.Event, health: Health
) -> WorkerConfig | None:
    """`claiming`, entered on `stack` as soon as a GPU is free; None if `stop` is set before.

    A worker without a GPU waits, since one that ended would be started again and again. Raises `SetupError`.
    """
    loading = health.not_ready
    while not stop.is_set():
        try:
            claimed = stack.enter_context(claiming(config))
        except CapacityError as error:
            if health.not_ready == loading:
                log.error("no_gpu_free", reason=error)
                notify.status("waiting for a free GPU")
            health.not_ready = "waiting for a free GPU"
        else:
            health.not_ready = loading
            notify.status("loading the model")
            return claimed
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _CLAIM_INTERVAL_S)
    return None


@contextmanager
def claiming(config: WorkerConfig) -> Iterator[WorkerConfig]:
    """The settings with the cores, or the GPUs, that this worker now holds, until the block or the process ends.

    Unchanged without --claim-dir. Raises `SetupError`, and `CapacityError` while other workers hold the GPUs.
    """
    if config.claim_dir is None:
        yield config
        return
    require_claimable(config)
    directory = Path(config.claim_dir)
    with ExitStack() as stack:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            claimed = _claim(config, directory, stack)
        except OSError as error:
            raise SetupError(
                f"Cannot use --claim-dir {directory}: {error.strerror}. Name a directory that all workers of this "
                "machine share, and that this user can write to, such as /dev/shm/pdserve."
            ) from error
        yield claimed


def _claim(config: WorkerConfig, directory: Path, stack: ExitStack) -> WorkerConfig:
    if config.device.startswith("cuda"):
        return _claim_gpus(config, directory, stack)
    cores = available_cores()
    if config.cpus:
        require_cpus(config)
        claims = stack.enter_context(CoreClaims(directory / "cores"))
        if taken := sorted(set(config.cpus) - set(claims.take(config.cpus, config.cpus, len(config.cpus)))):
            raise SetupError(f"--cpus names cores {taken}, which another worker has claimed. Choose others.")
        return with_cores(config, config.cpus, cores, str(directory / "cores"))
    if cores.has_quota:
        # A borrowed core would be paid from this container's quota, and every container would pin the same cores.
        log.info("cores_not_claimed", reason="CPU quota", usable=cores.usable)
        return config
    claims = stack.enter_context(CoreClaims(directory / "cores"))
    own = claims.take(cores.ids, cores.ids, num_to_claim(config, cores))
    claimed = with_cores(config, own, cores, str(directory / "cores"))
    if own:
        log.info("cores_claimed", cpus=",".join(map(str, own)))
    else:
        log.warning("no_core_free", cores=len(cores.ids), threads=claimed.threads)
    return claimed


def _claim_gpus(config: WorkerConfig, directory: Path, stack: ExitStack) -> WorkerConfig:
    """Claims the GPU of `--device cuda:1`, or for `--device cuda` the first free one; with ranks its neighbours too."""
    count, size = torch.cuda.device_count(), config.tensor_parallel_size
    _, is_named, index = config.device.partition(":")
    wanted = range(count)
    if is_named:
        if not index.isdigit() or int(index) + size > count:
            return config  # `open_device` says what is wrong.
        wanted = range(int(index), int(index) + size)
    elif size > count:
        return config
    own = stack.enter_context(GpuClaims(directory)).take(wanted, size)
    if own is None:
        raise CapacityError(
            f"--device {config.device} needs {size} free GPU{'s, side by side' if size > 1 else ''}, but other workers "
            f"have claimed too many of {count}. This worker waits for them. On a machine with a single GPU start a "
            "decode worker alone, which also prefills. Otherwise scale a tier down, or share a GPU: name it (--device "
            "cuda:0) without --claim-dir, with a lower --gpu-memory-utilization on each of its workers."
        )
    log.info("gpus_claimed", devices=",".join(f"cuda:{gpu}" for gpu in own))
    return replace(config, device=f"cuda:{own.start}")
