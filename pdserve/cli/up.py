"""`pdserve up`: starts a cluster on this machine and keeps it running until Ctrl-C.

Resolves the model, then starts Redis, the router and the workers as separate processes, and restarts what dies.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pdserve import __version__
from pdserve.base.config import child_environment, load, variable
from pdserve.base.errors import SetupError
from pdserve.base.machine import available_memory_bytes
from pdserve.cli.log_watch import watched_logs
from pdserve.cli.machine import available_cores, num_gpus
from pdserve.cli.placement import (
    GpuShare,
    gpus_of_both,
    kv_bytes_per_worker,
    lend_cores,
    ranks_share_gpus,
    share_cores,
    share_gpus,
)
from pdserve.cli.run_dir import private_directory
from pdserve.cli.services import ClusterPlan, router_spec, worker_specs
from pdserve.cli.stop_signals import StopSignals, finished_before
from pdserve.cli.supervisor.supervisor import Supervisor, supervising
from pdserve.cli.up_config import UpConfig
from pdserve.cli.up_console import UpConsole, describe_plan, describe_ready, reachable_host
from pdserve.cli.up_model import PreparedModel, prepare_command, prepare_model
from pdserve.cli.up_redis import RedisPlan, plan_redis, require_reachable

#: What processes get to end by themselves after a failed start: nothing runs on them that could be lost.
_FAILED_START_GRACE_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Runs the cluster; returns 0 once it was stopped on request. Raises `SetupError` when it cannot start."""
    config = load(UpConfig, "up", argv, description=__doc__)
    return asyncio.run(_Up(config, UpConsole()).run())


@dataclass(slots=True)
class _Up:
    """One run of `pdserve up`."""

    config: UpConfig
    console: UpConsole
    #: What to show once everything is ready.
    ready_text: str = ""

    async def run(self) -> int:
        """From the first check to the last process's end."""
        started_at = time.monotonic()
        require_free_ports(self.config)
        require_gpus_apart(self.config)
        log_dir = make_log_dir(self.config.log_dir)
        self.console.say(f"pdserve {__version__}   logs: {log_dir}")
        with (
            private_directory() as run_dir,
            watched_logs(log_dir, self.console.on_log) as watching,
        ):
            if not watching:
                self.console.say("Too many inotify watches on this machine: warnings are only in the logs.", "yellow")
            redis = plan_redis(self.config.redis_url, run_dir=run_dir, log_dir=log_dir)
            await self._supervise(redis, run_dir, log_dir, started_at)
        self.console.say("Stopped.")
        return 0

    async def _supervise(self, redis: RedisPlan, run_dir: Path, log_dir: Path, started_at: float) -> None:
        async with supervising(self.console.on_event) as supervisor:
            signals = StopSignals(on_again=lambda: self._hurry(supervisor))
            try:
                with self.console.progress():
                    finished = await finished_before(
                        signals.requested, self._start(supervisor, redis, run_dir, log_dir, started_at)
                    )
            except SetupError:
                self.console.quiet = True  # the error says it; how the others end does not matter
                await supervisor.stop(at_most_s=_FAILED_START_GRACE_S)
                raise
            if not finished:
                self.console.say("\nStopping before the cluster was ready.")
                await supervisor.stop(at_most_s=_FAILED_START_GRACE_S)
                return
            self.console.say(self.ready_text)
            await signals.requested.wait()
            self.console.say("\nStopping: the router finishes what runs, then the workers and Redis end.")
            await supervisor.stop()

    async def _start(
        self, supervisor: Supervisor, redis: RedisPlan, run_dir: Path, log_dir: Path, started_at: float
    ) -> None:
        """Until everything is ready, and `ready_text` says so. Raises `SetupError`."""
        config = self.config
        if redis.spec is None:
            await require_reachable(redis.url)
        else:
            await supervisor.start(redis.spec)
        model = await self._prepare_model(log_dir)
        plan = make_plan(config, model, redis, run_dir=run_dir, log_dir=log_dir)
        workers = worker_specs(plan)
        self.console.say(f"Starting {model.served_name} from {model.path}")
        for line in describe_plan([spec.name for spec in workers], plan.shares, plan.gpus, plan.kv_cache_bytes):
            self.console.say(line)
        for line in drawbacks(config, plan.gpus):
            self.console.say(line, "yellow")
        await supervisor.start(*workers, router_spec(plan))
        host = reachable_host(config.host)
        self.ready_text = describe_ready(
            base_url=f"http://{host}:{config.port}",
            grpc_address=f"{host}:{config.effective_grpc_port}",
            served_name=plan.served_name,
            log_dir=log_dir,
            took_s=time.monotonic() - started_at,
        )

    async def _prepare_model(self, log_dir: Path) -> PreparedModel:
        self.console.doing("model", f"resolving {self.config.model}")
        try:
            return await prepare_model(
                prepare_command(self.config.model, self.config.cache_dir, python_flags()),
                environment=child_environment(),
                log_path=log_dir / "model.log",
                on_progress=lambda text: self.console.doing("model", text),
            )
        finally:
            self.console.doing("model", None)

    def _hurry(self, supervisor: Supervisor) -> None:
        self.console.say("Stopping at once: running requests are lost.", "yellow")
        supervisor.hurry()


def make_plan(config: UpConfig, model: PreparedModel, redis: RedisPlan, *, run_dir: Path, log_dir: Path) -> ClusterPlan:
    """Divides this machine among the workers."""
    shares = share_cores(
        available_cores(),
        num_prefill=config.prefill,
        num_decode=config.decode,
        threads_per_worker=config.threads_per_worker,
    )
    gpus = gpu_shares(config)
    kv_bytes = config.kv_cache_memory
    if not gpus and kv_bytes is None:
        kv_bytes = kv_bytes_per_worker(available_memory_bytes(), config.num_workers)
    return ClusterPlan(
        config=config,
        model_path=model.path,
        served_name=config.served_model_name or model.served_name,
        redis_url=redis.url,
        log_dir=log_dir,
        shares=lend_cores(shares) if can_lend(config) else shares,
        gpus=gpus,
        kv_cache_bytes=kv_bytes,
        core_leases=run_dir / "cores",
        id_prefix="" if redis.spec is not None else f"{socket.gethostname()}-{config.port}-",
        environment=child_environment(),
        python_flags=python_flags(),
    )


def can_lend(config: UpConfig) -> bool:
    """Threads that wait for a GPU have nothing to lend that others could use, and ranks stay where they are."""
    return config.lend_cores and config.device == "cpu" and max(config.num_ranks.values()) == 1


def gpu_shares(config: UpConfig) -> list[GpuShare]:
    """Each worker's part of the GPUs; none when they compute on the CPU."""
    if config.device == "cpu":
        return []
    num_ranks = [config.num_ranks["prefill"]] * config.prefill + [config.num_ranks["decode"]] * config.decode
    if config.device == "cuda":
        return share_gpus(num_gpus(), num_ranks=num_ranks, utilization=config.gpu_memory_utilization)
    memory = int(100 * config.gpu_memory_utilization / config.num_workers) / 100
    shares = [GpuShare(device=config.device, memory=memory, num_ranks=size) for size in num_ranks]
    largest = max(shares, key=lambda share: share.num_ranks)
    # A single GPU a worker looks for itself, and it knows better.
    if largest.num_ranks > 1 and largest.gpus.stop > num_gpus():
        raise SetupError(
            f"--device {config.device} and --tensor-parallel-size {largest.num_ranks} need cuda:{largest.gpus.start} "
            f"to cuda:{largest.gpus.stop - 1}, and this machine has {num_gpus()} GPUs."
        )
    return shares


def require_gpus_apart(config: UpConfig) -> None:
    """Raises `SetupError` where NCCL would have to connect two processes on one GPU, which it cannot."""
    if config.transport != "nccl" or config.handover_memory != "device":
        return
    if shared := gpus_of_both(gpu_shares(config), config.prefill):
        names = " and ".join(f"cuda:{gpu}" for gpu in shared)
        raise SetupError(
            f"--transport nccl with --handover-memory device connects different GPUs only, and with --device "
            f"{config.device}, --prefill {config.prefill} and --decode {config.decode} workers of both tiers are on "
            f"{names}: use --transport ucx, or --device cuda and no more workers than GPUs."
        )


def drawbacks(config: UpConfig, gpus: Sequence[GpuShare]) -> list[str]:
    """What is legal, but hardly wanted: a line each."""
    lines = []
    if ranks_share_gpus(gpus):
        lines.append(
            "Workers of several ranks share GPUs: a rank keeps its GPU busy while it waits for another, which waits "
            "for the GPU. That is slow; give every worker GPUs of its own."
        )
    if len(set(config.num_ranks.values())) > 1:
        sizes = ", ".join(f"{tier} {size}" for tier, size in config.num_ranks.items())
        lines.append(
            f"The tiers have different numbers of ranks ({sizes}): the last bits of an answer may depend on which of "
            "them computed its prompt, see docs/exactness.md."
        )
    return lines


def require_free_ports(config: UpConfig) -> None:
    """Tells a taken port in a moment instead of after the model was loaded. Raises `SetupError`."""
    for flag, port in (("--port", config.port), ("--grpc-port", config.effective_grpc_port)):
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((config.host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SetupError(
                f"Cannot listen on {config.host}:{port}: {reason}. Choose another with {flag} or --host."
            ) from error


def make_log_dir(chosen: str | None) -> Path:
    """The directory for this run's logs: the chosen one, else a new one named after the time. Raises `SetupError`."""
    if chosen is not None:
        path = Path(chosen).expanduser().absolute()
    else:
        state = variable("XDG_STATE_HOME")
        root = Path(state) if state else Path.home() / ".local" / "state"
        path = root / "pdserve" / "logs" / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"Cannot make the log directory {path}: {error.strerror}. Choose one with --log-dir."
        ) from error
    return path


def python_flags() -> tuple[str, ...]:
    """`-P` unless our own search path holds the working directory: whatever lies there must not shadow a module."""
    return () if "" in sys.path or os.getcwd() in sys.path else ("-P",)
