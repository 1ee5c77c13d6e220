"""`pdserve up`: starts a cluster on this machine and keeps it running until Ctrl-C.

Resolves the model, then starts Redis, the router and the workers as separate processes, and restarts what dies.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve import __version__
from pdserve.base.config import child_environment, load
from pdserve.base.errors import SetupError
from pdserve.base.tasks import service_group
from pdserve.cli.cluster_plan import (
    ClusterPlan,
    PreparedModel,
    RunEnvironment,
    for_one_gpu,
    make_plan,
    plan_warnings,
    require_separate_gpus,
)
from pdserve.cli.hardware import available_hardware
from pdserve.cli.interpreter import python_flags
from pdserve.cli.listen_check import require_free_ports
from pdserve.cli.log_rotation import LogLimits, rotating
from pdserve.cli.log_watch import watched_logs
from pdserve.cli.placement import Hardware
from pdserve.cli.run_dir import log_directory, private_directory
from pdserve.cli.services import router_spec, worker_specs
from pdserve.cli.stop_signals import StopSignals, finished_before
from pdserve.cli.supervisor.fork_server import ForkServer
from pdserve.cli.supervisor.supervisor import Supervisor, supervising
from pdserve.cli.up_config import UpConfig
from pdserve.cli.up_console import UpConsole, describe_plan, describe_ready, reachable_host
from pdserve.cli.up_model import prepare_command, prepare_model
from pdserve.cli.up_redis import plan_redis, require_reachable
from pdserve.cli.up_secret import own_secret
from pdserve.cli.vllm_flags import translate
from pdserve.cli.weight_memory import private_weight_bytes
from pdserve.cli.worker_forks import fork_server, prepare_forks
from pdserve.net import notify

#: Grace of processes after a failed start: no request runs on them that could be lost.
_FAILED_START_GRACE_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Runs the cluster; returns 0 once it was stopped on request. Raises `SetupError` when it cannot start."""
    translation = translate(argv)
    config = load(UpConfig, "up", translation.arguments, description=__doc__)
    console = UpConsole()
    for note in translation.notes:
        console.say(note)
    asyncio.run(run(config, console))
    return 0


async def run(config: UpConfig, console: UpConsole) -> None:
    """Runs a cluster from the first check to the last process's end. Raises `SetupError` when it cannot start."""
    started_at = time.monotonic()
    hardware = available_hardware()
    given, config = config, for_one_gpu(config, hardware.num_gpus)
    require_free_ports(config)
    require_separate_gpus(config, hardware.num_gpus)
    with log_directory(config.log_dir, max_runs=config.log_max_runs) as log_dir:
        console.say(f"pdserve {__version__}   logs: {log_dir}")
        if config is not given:
            console.say("One GPU: no prefill worker, since sharing it would be slower. --prefill 1 starts one.")
        await _run(config, console, hardware, log_dir, started_at)
    console.say("Stopped.")


async def _run(config: UpConfig, console: UpConsole, hardware: Hardware, log_dir: Path, started_at: float) -> None:
    limits = LogLimits(max_bytes=config.log_max_size, max_files=config.log_max_files)
    with private_directory() as run_dir, watched_logs(log_dir, console.on_log) as watching:
        if not watching:
            console.say("Too many inotify watches on this machine: warnings are only in the logs.", "yellow")
        environment = RunEnvironment(
            hardware=hardware,
            hostname=socket.gethostname(),
            run_dir=run_dir,
            log_dir=log_dir,
            variables=child_environment(**own_secret(config, run_dir)),
            python_flags=python_flags(),
        )
        async with service_group() as tasks, supervising(console.on_event) as supervisor:
            tasks.start(rotating(log_dir, limits), name="log-rotation")
            supervisor.fork_from(forks := fork_server(config, environment))
            await _Up(config, console, environment, supervisor, forks, started_at).run()


@dataclass(slots=True)
class _Up:
    """One run of `pdserve up`."""

    config: UpConfig
    console: UpConsole
    environment: RunEnvironment
    supervisor: Supervisor
    forks: ForkServer | None
    started_at: float
    #: Text to show once everything is ready.
    ready_text: str = ""

    async def run(self) -> None:
        """Starts the cluster and stops it when a signal requests that. Raises `SetupError` when it cannot start."""
        signals = StopSignals(on_again=self._hurry)
        try:
            with self.console.progress():
                finished = await finished_before(signals.requested, self._start())
        except SetupError:
            self.console.quiet = True  # The error explains the failure; how the other processes end does not matter.
            await self.supervisor.stop(max_grace_s=_FAILED_START_GRACE_S)
            raise
        if not finished:
            self.console.say("\nStopping before the cluster was ready.")
            await self.supervisor.stop(max_grace_s=_FAILED_START_GRACE_S)
            return
        self.console.say(self.ready_text)
        await notify.report_ready()
        await signals.requested.wait()
        self.console.say("\nStopping: the router finishes running requests, then the workers and Redis end.")
        await self.supervisor.stop()

    async def _start(self) -> None:
        """Returns when everything is ready, with `ready_text` set. Raises `SetupError`."""
        redis = plan_redis(self.config.redis_url, run_dir=self.environment.run_dir, log_dir=self.environment.log_dir)
        if redis.spec is None:
            await require_reachable(redis.url)
        else:
            await self.supervisor.start(redis.spec)
        plan = make_plan(self.config, await self._prepare_models(), redis, self.environment)
        prepare_forks(self.forks, [model.path for model in plan.models])
        workers = worker_specs(plan)
        for model in plan.models:
            self.console.say(f"Starting {model.served_name} from {model.path}")
        for line in describe_plan(_labels(plan), plan.shares, plan.gpus, plan.kv_cache_bytes):
            self.console.say(line)
        for line in plan_warnings(self.config, plan.gpus):
            self.console.say(line, "yellow")
        await self.supervisor.start(*workers, router_spec(plan))
        self.ready_text = self._describe_ready(plan)

    async def _prepare_models(self) -> list[PreparedModel]:
        return [await self._prepare_model(name) for name in self.config.model]

    async def _prepare_model(self, name: str) -> PreparedModel:
        self.console.doing("model", f"resolving {name}")
        try:
            model = await prepare_model(
                prepare_command(name, self.config.cache_dir, self.environment.python_flags),
                environment=self.environment.variables,
                log_path=self.environment.log_dir / "model.log",
                on_progress=lambda text: self.console.doing("model", text),
            )
            return replace(model, weight_bytes=private_weight_bytes(model.path, self.config))
        finally:
            self.console.doing("model", None)

    def _describe_ready(self, plan: ClusterPlan) -> str:
        host = reachable_host(self.config.host)
        scheme = "http" if self.config.ssl_certfile is None else "https"
        return describe_ready(
            base_url=f"{scheme}://{host}:{self.config.port}",
            grpc_address=f"{host}:{self.config.effective_grpc_port}",
            served_names=[model.served_name for model in plan.models],
            log_dir=plan.log_dir,
            took_s=time.monotonic() - self.started_at,
            console_url=f"{scheme}://{host}:{self.config.admin_port or self.config.port}"
            if self.config.console
            else None,
        )

    def _hurry(self) -> None:
        self.console.say("Stopping at once: running requests are lost.", "yellow")
        self.supervisor.hurry()


def _labels(plan: ClusterPlan) -> list[str]:
    """The workers' names, with their models if there are several."""
    if len(plan.models) == 1:
        return [worker.name for worker in plan.workers]
    return [f"{worker.name} ({worker.model.served_name})" for worker in plan.workers]
