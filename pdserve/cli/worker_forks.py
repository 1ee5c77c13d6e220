"""The fork server of a cluster's workers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from pdserve.cli.cluster_plan import RunEnvironment, gpu_shares
from pdserve.cli.services import thread_environment
from pdserve.cli.supervisor.fork_server import ForkServer
from pdserve.cli.up_config import UpConfig

#: What workers import.
WORKER_MODULES = ("worker_svc.service", "pdserve.worker.serve.process")
#: What those on CPUs import besides. On a GPU, ucxx asks NVML, which opens it.
CPU_MODULES = ("kvtransfer.transport.with_local",)
#: Variables of these imports alone. The first is read by libucx when it is loaded; workers that load it by themselves
#: set it before. With the second, at UCX's default, ucxx does not ask NVML on machines whose GPUs the cluster leaves.
IMPORT_VARIABLES = {"UCX_MEMTYPE_CACHE": "n", "UCX_CUDA_COPY_MAX_REG_RATIO": "0.1"}
#: What those on GPUs import besides, once they know that they have one: Triton, and the modules of its kernels.
GPU_MODULES = (
    "kernels.triton.decoder",
    "kernels.triton.tile_check",
    "pdserve.engine.device_sampler",
    "pdserve.worker.kv_bytes.device_blocks",
    "pdserve.worker.kv_bytes.staged_offers",
)


def fork_server(config: UpConfig, run: RunEnvironment) -> ForkServer | None:
    """What forks the workers, so that they start without importing; None where they are executed."""
    if not config.fork_workers:
        return None
    others: tuple[str, ...] = ()
    if gpu_shares(config, run.hardware.num_gpus):
        others = GPU_MODULES
    elif config.transport == "ucx":
        others = CPU_MODULES
    return ForkServer(
        (sys.executable, *run.python_flags),
        (*WORKER_MODULES, *others),
        {**IMPORT_VARIABLES, **run.variables, **thread_environment(1)},
        run.log_dir / "fork-server.log",
    )


def prepare_forks(server: ForkServer | None, models: Iterable[Path]) -> None:
    """The server reads what workers of these models would read at each start, besides their weights."""
    if server is not None:
        server.prepare([("pdserve.model.vocabularies", "read_vocabularies", str(model)) for model in models])
