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
_WORKER_MODULES = ("worker_svc.service", "pdserve.worker.serve.process")


def fork_server(config: UpConfig, run: RunEnvironment) -> ForkServer | None:
    """What forks the workers, so that they start without importing; None where they are executed.

    CUDA in a forked process is not supported.
    """
    if not config.fork_workers or gpu_shares(config, run.hardware.num_gpus):
        return None
    return ForkServer(
        (sys.executable, *run.python_flags),
        _WORKER_MODULES,
        {**run.variables, **thread_environment(1)},
        run.log_dir / "fork-server.log",
    )


def prepare_forks(server: ForkServer | None, models: Iterable[Path]) -> None:
    """The server reads what workers of these models would read at each start, besides their weights."""
    if server is not None:
        server.prepare([("pdserve.model.vocabularies", "read_vocabularies", str(model)) for model in models])
