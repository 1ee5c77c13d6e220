"""The faults of an episode: what happens when, decided by the seed alone."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.engine import SimulatedStepLoop

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster
    from tests.simulation.phases import Phases

#: How often each kind happens, relative to the others.
WEIGHTS: dict[str, float] = {
    "kill": 12,
    "kill_router": 2,
    "kill_tier": 2,
    "power_off": 2,
    "terminate": 4,
    "terminate_router": 6,
    "drain": 6,
    "pause": 4,
    "hang": 3,
    "segments": 40,
    "reset": 10,
    "half_open": 4,
    "partition": 6,
    "slow_network": 6,
    "redis_stop": 2,
    "redis_flush": 2,
    "redis_pause": 2,
    "clock": 3,
    "aimed": 40,
}
_SEGMENTS = ("drop", "repeat", "truncate", "corrupt", "late")


@dataclass(frozen=True)
class Fault:
    """One fault. `choice` decides whom it hits and how long it lasts."""

    at: float
    kind: str
    choice: int


def plan_faults(chance: Random, count: int, duration_s: float) -> list[Fault]:
    """Faults over the duration, in order."""
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    times = sorted(chance.uniform(0.2, duration_s) for _ in range(count))
    return [Fault(at, chance.choices(kinds, weights)[0], chance.getrandbits(60)) for at in times]


class Faults:
    """Makes faults happen to a cluster."""

    def __init__(self, cluster: SimulatedCluster, phases: Phases) -> None:
        self._cluster = cluster
        self._phases = phases
        self._network = cluster.network
        self._loop = cluster.network.loop
        self.done: dict[str, int] = {}

    def strike(self, fault: Fault) -> None:
        """Now."""
        chance = Random(fault.choice)
        self.done[fault.kind] = self.done.get(fault.kind, 0) + 1
        self._network.note("fault", fault.kind)
        action: Callable[[Random], None] = getattr(self, f"_{fault.kind}")
        action(chance)

    def _aimed(self, chance: Random) -> None:
        self._phases.aim(chance)

    def _worker(self, chance: Random) -> str:
        return chance.choice(self._cluster.worker_names)

    def _pair(self, chance: Random) -> tuple[str, str]:
        names = (*self._cluster.worker_names, *self._cluster.router_names)
        one, other = chance.sample(names, 2)
        return one, other

    def _kill(self, chance: Random) -> None:
        self._cluster.kill(self._worker(chance), after_s=chance.choice((0.3, 1.0, 2.5)))

    def _kill_router(self, chance: Random) -> None:
        self._cluster.kill(chance.choice(self._cluster.router_names), after_s=1.0)

    def _kill_tier(self, chance: Random) -> None:
        tier = chance.choice("pd")
        for name in self._cluster.worker_names:
            if name.startswith(tier):
                self._cluster.kill(name, after_s=chance.uniform(0.3, 4.0))

    def _power_off(self, chance: Random) -> None:
        self._cluster.kill(self._worker(chance), after_s=chance.uniform(2.0, 20.0), with_host=True)

    def _terminate(self, chance: Random) -> None:
        self._cluster.terminate(self._worker(chance))

    def _terminate_router(self, chance: Random) -> None:
        grace_s = chance.choice((0.0, 0.02, 0.2, 20.0))
        self._cluster.terminate_router(chance.choice(self._cluster.router_names), grace_s)

    def _drain(self, chance: Random) -> None:
        self._drain_busy(chance.choice((0.05, 0.5, 4.0)), self._loop.time() + 3.0)

    def _drain_busy(self, for_s: float, until: float) -> None:
        """The busiest decode worker, once one has several requests."""
        workers = [self._cluster.workers[name] for name in self._cluster.worker_names if name.startswith("d")]
        busiest = max(workers, key=lambda worker: worker.num_requests)
        if busiest.num_requests > 1 or self._loop.time() >= until:
            busiest.drain(for_s)
        else:
            self._loop.call_later(0.01, self._drain_busy, for_s, until, context=Context())

    def _pause(self, chance: Random) -> None:
        name = chance.choice((*self._cluster.worker_names, *self._cluster.router_names))
        self._loop.pause(self._cluster.process_of(name), chance.choice((0.05, 0.5, 2.0, 12.0)))

    def _hang(self, chance: Random) -> None:
        worker = self._cluster.workers[self._worker(chance)]
        if worker.service is not None and not worker.process.is_dead:
            SimulatedStepLoop.delays[id(worker.service.scheduler)] = chance.choice((0.5, 3.0, 15.0))

    def _segments(self, chance: Random) -> None:
        kind = chance.choice(_SEGMENTS)
        self._cluster.wire_faults.planned += [kind] * chance.choice((1, 1, 1, 2, 6))

    def _reset(self, chance: Random) -> None:
        one, other = self._pair(chance)
        self._network.break_all(one, other, ConnectionResetError(104, "Connection reset by peer"))

    def _half_open(self, chance: Random) -> None:
        one, other = self._pair(chance)
        error = ConnectionResetError(104, "Connection reset by peer")
        self._network.break_all(one, other, error, is_noticed=False)

    def _partition(self, chance: Random) -> None:
        one, other = self._pair(chance)
        self._network.cut(one, other, chance.choice((0.2, 1.0, 5.0, 20.0)))

    def _slow_network(self, chance: Random) -> None:
        self._network.slow_down(chance.uniform(0.5, 4.0), chance.choice((0.01, 0.1, 0.5)))

    def _redis_stop(self, chance: Random) -> None:
        self._cluster.restart_redis(after_s=chance.choice((0.2, 2.0, 8.0)), loses_data=chance.random() < 0.5)

    def _redis_flush(self, chance: Random) -> None:
        self._cluster.redis.data.flush()

    def _redis_pause(self, chance: Random) -> None:
        self._loop.pause(self._cluster.redis.process, chance.choice((0.3, 1.0, 6.0)))

    def _clock(self, chance: Random) -> None:
        name = chance.choice((*self._cluster.worker_names, *self._cluster.router_names))
        self._cluster.process_of(name).clock_offset_s += chance.choice((-86400.0, -60.0, 60.0, 86400.0))
