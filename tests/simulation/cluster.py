"""The processes of one episode: who runs, who dies, and who is started again."""

from __future__ import annotations

from contextvars import Context
from random import Random
from typing import Any

from tests.simulation.loop import Process, SimulatedLoop
from tests.simulation.network import Network
from tests.simulation.redis_link import RedisProcess
from tests.simulation.redis_server import RedisServer
from tests.simulation.router import SimulatedRouter
from tests.simulation.wire import WireFaults, WireTransport
from tests.simulation.worker import SimulatedWorker, WorkerPlan

#: Time that a router waits for a worker that is expected back: longer than any outage here.
RETURN_TIMEOUT_S = 60.0


class SimulatedCluster:
    """Two workers of each tier, two routers and a Redis, under a supervisor that starts again what has died."""

    worker_names = ("p0", "p1", "d0", "d1")
    router_names = ("r0", "r1")

    def __init__(
        self, network: Network, plan: WorkerPlan, *, threshold: int, resume_timeout_s: float, secret: Any = None
    ) -> None:
        """`resume_timeout_s`: 0 if no stream goes on at another router."""
        self.network = network
        self.loop: SimulatedLoop = network.loop
        self.plan = plan
        self._threshold = threshold
        self._resume_timeout_s = resume_timeout_s
        self._secret = secret
        self.wire_faults = WireFaults()
        self._wires: dict[bytes, WireTransport] = {}
        self.redis = RedisProcess(network, RedisServer(self._redis_clock))
        self.workers: dict[str, SimulatedWorker] = {}
        self._ending: set[SimulatedWorker | SimulatedRouter] = set()
        self.routers: dict[str, SimulatedRouter] = {}
        #: Dead processes and what they held: nothing of theirs may be collected, which would run their code.
        self._dead: list[Any] = []
        #: Nobody is started any more.
        self.is_over = False
        for name in self.worker_names:
            self._start_worker(name)
        for name in self.router_names:
            self._start_router(name)

    def _redis_clock(self) -> float:
        return 1_800_000_000.0 + self.loop.time()

    def process_of(self, name: str) -> Process:
        """The present incarnation."""
        return self.workers[name].process if name in self.workers else self.routers[name].process

    @property
    def all_ready(self) -> bool:
        """Whether every process serves."""
        everyone = [*self.workers.values(), *self.routers.values()]
        return all(each.is_ready and not each.process.is_dead for each in everyone)

    def kill(self, name: str, *, after_s: float, with_host: bool = False) -> None:
        """As SIGKILL; the supervisor starts it again after that time."""
        process = self.process_of(name)
        if process.is_dead:
            return
        self.loop.kill(process, with_host=with_host)
        self._start_later(name, after_s)

    def terminate(self, name: str) -> None:
        """As SIGTERM; the supervisor starts the worker again when it has ended."""
        worker = self.workers[name]
        if worker.is_ready and not worker.process.is_dead:
            worker.terminate()
            self._restart_at_end(worker)

    def terminate_router(self, name: str, grace_s: float) -> None:
        """The same for a router, whose requests have so much time to end."""
        router = self.routers[name]
        if router.is_ready and not router.process.is_dead:
            router.terminate(grace_s)
            self._restart_at_end(router)

    def _restart_at_end(self, ending: SimulatedWorker | SimulatedRouter) -> None:
        if ending not in self._ending:  # One that is paused looks ready behind its first signal.
            self._ending.add(ending)
            self._await_end(ending)

    def _await_end(self, ending: SimulatedWorker | SimulatedRouter) -> None:
        if ending.process.is_dead:
            if ending.has_ended and ending in (self.workers.get(ending.name), self.routers.get(ending.name)):
                self._start_later(ending.name, 0.5)
        else:
            self._later(0.2, self._await_end, ending)

    def restart_redis(self, *, after_s: float, loses_data: bool) -> None:
        """As SIGKILL of Redis, with or without its file."""
        if self.redis.process.is_dead:
            return
        self.loop.kill(self.redis.process)
        data = self.redis.data
        if loses_data:
            data.flush()

        def start() -> None:
            self.redis = RedisProcess(self.network, data)

        self._later(after_s, start)

    def _start_later(self, name: str, after_s: float) -> None:
        start = self._start_worker if name in self.workers else self._start_router
        self._later(after_s, start, name)

    def _later(self, after_s: float, call: Any, *arguments: Any) -> None:
        self.loop.call_later(after_s, call, *arguments, context=Context())

    def _start_worker(self, name: str) -> None:
        if self.is_over:
            return
        if name in self.workers:
            self._bury(self.workers[name])
        worker = SimulatedWorker(name, self.network, self.plan, self.wire_faults, self._wires)
        self.workers[name] = worker
        worker.start(self._secret)

    def _start_router(self, name: str) -> None:
        if self.is_over:
            return
        if name in self.routers:
            self._bury(self.routers[name])
        router = SimulatedRouter(name, self.network, self._threshold, RETURN_TIMEOUT_S, self._resume_timeout_s)
        self.routers[name] = router
        router.start(self._secret)

    def _bury(self, dead: SimulatedWorker | SimulatedRouter) -> None:
        # Its connections that nobody could close are reset by the new process's host.
        self._dead.append((dead, list(dead.process.tasks)))

    def leftovers(self) -> list[str]:
        """What live processes hold that they should not, once no request is open."""
        everyone = [*self.workers.values(), *self.routers.values()]
        return [each for one in everyone for each in one.leftovers()]


def random_plan(chance: Random) -> WorkerPlan:
    """Settings of workers, small enough that memory is short now and then."""
    is_staged = chance.random() < 0.4
    return WorkerPlan(
        num_blocks={"prefill": chance.choice((24, 60)), "decode": chance.choice((18, 26, 60, 160, 160))},
        lease_s=chance.choice((3.0, 8.0)),
        layer_groups=chance.choice((1, 2)),
        is_staged=is_staged,
        is_local=not is_staged and chance.random() < 0.6,
        bundle_blocks=chance.choice((1, 2, 3)) if is_staged else 1,
        max_num_seqs=chance.choice((4, 8)),
        chunk_tokens=chance.choice((8, 16)),
        drain_timeout_s=chance.choice((0.2, 20.0)),
        replication_interval_ms=chance.choice((0.0, 1.0, 4.0)),
    )
