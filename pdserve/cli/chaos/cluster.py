"""The cluster under test: started like that of `pdserve up`, with several routers, and seen by its supervisor."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.base.config import child_environment
from pdserve.cli.chaos.config import ChaosConfig
from pdserve.cli.chaos.faults import DECODE, PREFILL, REDIS, ROUTER, Target
from pdserve.cli.cluster_plan import ClusterPlan, PreparedModel, RunEnvironment, make_plan
from pdserve.cli.free_ports import free_ports
from pdserve.cli.hardware import available_hardware
from pdserve.cli.interpreter import python_flags
from pdserve.cli.run_dir import private_directory
from pdserve.cli.services import router_spec, worker_specs
from pdserve.cli.supervisor.backoff import BackoffPolicy
from pdserve.cli.supervisor.spec import BecameReady, Died, ProcessEvent, ProcessSpec, ProcessStarted, Stopped
from pdserve.cli.supervisor.supervisor import supervising
from pdserve.cli.up_config import UpConfig
from pdserve.cli.up_model import prepare_command, prepare_model
from pdserve.cli.up_redis import plan_redis
from pdserve.cli.up_secret import own_secret
from pdserve.cli.worker_forks import fork_server, prepare_forks

#: A process that the plan kills often is not one that fails by itself: the delay does not grow.
_BACKOFF = BackoffPolicy(first_s=0.5, max_s=0.5)
#: Streams outlive their router. The user's environment wins.
_RESUMABLE = {"PDSERVE_ROUTER__RESUME_TIMEOUT_S": "120"}
#: Requests go on where copies of their blocks are, so that faults meet copies, too.
_COPIED = {"PDSERVE_DECODE__REPLICATION_INTERVAL_MS": "250"}


@dataclass(slots=True)
class _Process:
    pid: int = 0
    is_ready: bool = False
    #: A fault holds it.
    is_held: bool = False


class ChaosCluster:
    """The processes of the cluster by name, such as `decode-0`, kept up to date by the supervisor's events."""

    def __init__(self) -> None:
        self.urls: Sequence[str] = ()
        self.redis_url = ""
        self.model = ""
        #: Process ids of all incarnations.
        self.pids: set[int] = set()
        #: Ends of processes that no fault explains.
        self.unexplained: list[str] = []
        self._processes: dict[str, _Process] = {}
        self._killed: set[int] = set()

    def on_event(self, event: ProcessEvent) -> None:
        """Takes in an event of the supervisor."""
        process = self._processes.setdefault(event.spec.name, _Process())
        match event:
            case ProcessStarted(pid=pid):
                process.pid, process.is_ready = pid, False
                self.pids.add(pid)
            case BecameReady():
                process.is_ready = True
            case Died(exit=end) | Stopped(exit=end):
                process.is_ready = False
                is_failure = isinstance(event, Died) or end.code not in (0, -15)
                if is_failure and process.pid not in self._killed:
                    self.unexplained.append(f"{event.spec.name} {end.describe()}: {end.reason}")

    def note_kill(self, name: str) -> None:
        """The process is about to be killed by a fault."""
        self._killed.add(self._processes[name].pid)

    def hold(self, name: str, held: bool) -> None:
        """While it is held, no other fault hits the process."""
        self._processes[name].is_held = held

    def pid(self, name: str) -> int:
        """The id of the present process."""
        return self._processes[name].pid

    def targets(self) -> list[Target]:
        """All processes, as faults see them."""
        return [
            Target(name=name, tier=tier_of(name), is_ready=process.is_ready and not process.is_held)
            for name, process in sorted(self._processes.items())
        ]

    def waited_for(self) -> list[str]:
        """Names of the processes that are not ready."""
        return [name for name, process in self._processes.items() if not process.is_ready]

    def router(self, preferred: int) -> int | None:
        """Index of a router that is ready, as a load balancer would choose it: the preferred one, if it is."""
        count = len(self.urls)
        order = [(preferred + step) % count for step in range(count)]
        return next((index for index in order if self._processes[f"{ROUTER}-{index}"].is_ready), None)


def tier_of(name: str) -> str:
    """`prefill`, `decode`, `router` or `redis`."""
    tier = name.partition("-")[0]
    assert tier in (PREFILL, DECODE, ROUTER, REDIS), name
    return tier


@asynccontextmanager
async def running_cluster(config: ChaosConfig, log_dir: Path) -> AsyncIterator[ChaosCluster]:
    """A ready cluster, which is drained and stopped at the end. Raises `SetupError` when it cannot start."""
    ports = free_ports(2 * config.routers)
    up = _up_config(config, ports)
    cluster = ChaosCluster()
    with private_directory() as run_dir:
        environment = RunEnvironment(
            hardware=available_hardware(),
            hostname=socket.gethostname(),
            run_dir=run_dir,
            log_dir=log_dir,
            variables={**_COPIED, **child_environment(**own_secret(up, run_dir))},
            python_flags=python_flags(),
        )
        async with supervising(cluster.on_event, backoff=_BACKOFF) as supervisor:
            supervisor.fork_from(forks := fork_server(up, environment))
            try:
                redis = plan_redis(None, run_dir=run_dir, log_dir=log_dir)
                assert redis.spec is not None
                await supervisor.start(redis.spec)
                plan = make_plan(up, [await _prepared(config, environment)], redis, environment)
                prepare_forks(forks, [model.path for model in plan.models])
                await supervisor.start(*worker_specs(plan), *_router_specs(plan, ports))
                cluster.urls = [f"http://{up.host}:{port}" for port in ports[::2]]
                cluster.redis_url, cluster.model = redis.url, plan.models[0].served_name
                yield cluster
            finally:
                await supervisor.stop()


def _up_config(config: ChaosConfig, ports: Sequence[int]) -> UpConfig:
    return UpConfig(
        model=(config.model,),
        port=ports[0],
        grpc_port=ports[1],
        prefill=config.prefill,
        decode=config.decode,
        kv_cache_memory=config.kv_cache_memory,
        # Prompts are handed over whenever a prefill worker can take them.
        local_prefill="threshold",
        # Any model thinks with the template that some requests bring, whose thinking is of this form.
        message_format="hermes",
        trust_request_chat_template=True,
        drain_timeout_s=5.0,
    )


async def _prepared(config: ChaosConfig, environment: RunEnvironment) -> PreparedModel:
    return await prepare_model(
        prepare_command(config.model, None, environment.python_flags),
        environment=environment.variables,
        log_path=environment.log_dir / "model.log",
        on_progress=lambda _: None,
    )


def _router_specs(plan: ClusterPlan, ports: Sequence[int]) -> list[ProcessSpec]:
    specs = []
    for index, (port, grpc_port) in enumerate(zip(ports[::2], ports[1::2], strict=True)):
        spec = router_spec(replace(plan, config=replace(plan.config, port=port, grpc_port=grpc_port)))
        name = f"{ROUTER}-{index}"
        environment = {**_RESUMABLE, **spec.environment}
        specs.append(replace(spec, name=name, environment=environment, log_path=plan.log_dir / f"{name}.log"))
    return specs
