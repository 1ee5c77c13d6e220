"""Faults that are aimed: each waits for a phase of a move or of copies, and strikes those who take part in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import TYPE_CHECKING, Any

from decode_svc.replication.replicas import Replicas
from decode_svc.scheduler import DecodeScheduler
from router_svc.records.events import Event, MoveEnded, MoveStarted
from router_svc.records.journal import Journal
from router_svc.request.migration.target import MigrationTarget
from tests.simulation.loop import current_process

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

#: What a fault can wait for. A move begins, its blocks have left, the other worker has taken over; a transfer was
#: committed; copies have arrived; a request has found copies of its blocks.
MOVES = ("move", "hand-off", "takeover")
PHASES = (*MOVES, "commit", "copies", "reuse")
#: What happens then, as often as it stands here.
_STRIKES = ("kill", "kill", "kill", "router", "half_open", "reset", "partition", "pause", "segments")
#: Time between the event and the fault, in seconds.
_DELAYS_S = (0.0, 0.0, 0.0005, 0.002, 0.006)
#: Time in which a request is looked for that is long enough to move, in seconds.
_LOOKING_S = 6.0


class Phases:
    """Counts the phases of an episode, and strikes in those that are aimed at. Patches the product: once a process."""

    def __init__(self) -> None:
        self.cluster: SimulatedCluster | None = None
        #: How often each phase was seen, and how often a fault has hit it.
        self.seen: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.hit: dict[str, int] = dict.fromkeys(PHASES, 0)
        #: Requests that have moved, by why they did.
        self.moved: Counter[str] = Counter()
        self._armed: list[tuple[str, Random]] = []
        #: Workers to be killed once they have sent copies, so that these are used.
        self._num_lures = 0
        #: Blocks of copies that each worker has used.
        self._used: dict[str, int] = {}
        self._watch_routers()
        self._watch_workers()

    def aim(self, chance: Random) -> None:
        """The next event of a phase is struck.

        For a phase of a move, a worker with a long request is drained; for copies that are used, their source killed.
        """
        phase = chance.choice(PHASES)
        self._armed.append((phase, chance))
        if phase == "reuse":
            self._num_lures += 1
        if phase in MOVES:
            self._cause_move(chance.choice((0.05, 0.5, 4.0)), self._live.loop.time() + _LOOKING_S)

    @property
    def _live(self) -> SimulatedCluster:
        assert self.cluster is not None
        return self.cluster

    def _cause_move(self, for_s: float, until: float) -> None:
        loop = self._live.loop
        for name in ("d0", "d1"):
            worker = self._live.workers[name]
            if worker.is_ready and not worker.process.is_dead:
                left = worker.service.scheduler.migrating.tokens_left()
                if max(left.values(), default=0) >= self._live.plan.longest_output // 3:
                    worker.drain(for_s)
                    return
        if loop.time() < until:
            loop.call_later(0.01, self._cause_move, for_s, until, context=Context())

    def _note(self, phase: str, *names: str) -> None:
        self.seen[phase] += 1
        armed = next((each for each in self._armed if each[0] == phase), None)
        process = current_process()
        if armed is None or process is None or self.cluster is None:
            return
        self._armed.remove(armed)
        self.hit[phase] += 1
        chance = armed[1]
        delay_s = chance.choice(_DELAYS_S)
        involved = [*dict.fromkeys((*names, process.name))]
        self.cluster.loop.call_later(delay_s, self._strike, chance, involved, context=Context())

    def _strike(self, chance: Random, names: list[str]) -> None:
        """`names`: who takes part, at least one of them a worker."""
        cluster, network = self._live, self._live.network
        kind = chance.choice(_STRIKES)
        workers = [name for name in names if name in cluster.workers]
        routers = [name for name in names if name in cluster.routers] or [*cluster.router_names]
        victim, router = chance.choice(workers), chance.choice(routers)
        other = chance.choice([name for name in (*names, *routers) if name != victim])
        network.note("aimed", kind, f"{victim} {other}")
        if kind == "kill":
            cluster.kill(victim, after_s=chance.choice((0.3, 1.0, 2.5)))
        elif kind == "router":
            cluster.kill(router, after_s=1.0)
        elif kind == "pause":
            cluster.loop.pause(cluster.process_of(victim), chance.choice((0.05, 0.5, 2.0)))
        elif kind == "partition":
            network.cut(victim, other, chance.choice((0.2, 1.0, 5.0)))
        elif kind == "segments":
            cluster.wire_faults.planned += [chance.choice(("drop", "repeat", "corrupt", "late"))] * 2
        else:
            error = ConnectionResetError(104, "Connection reset by peer")
            network.break_all(victim, other, error, is_noticed=kind == "reset")

    def _kill(self, worker: str) -> None:
        self._live.kill(worker, after_s=1.0)

    def _watch_routers(self) -> None:
        def appended(journal: Any, event: Event) -> None:
            match event:
                case MoveStarted(source=source, target=target):
                    self._note("move", source, target)
                case MoveEnded(outcome=outcome) if outcome.has_moved:
                    move = journal.record.migrations[-1]
                    self.moved[move.reason] += 1
                    self._note("takeover", move.source, move.target)

        def handed_off(follower: Any, result: Any) -> None:
            self._note("hand-off", follower._source.worker.worker_id, follower._target.worker.worker_id)

        _after(Journal, "append", appended)
        _after(MigrationTarget, "handed_off", handed_off)

    def _watch_workers(self) -> None:
        def activated(scheduler: Any, *arguments: Any) -> None:
            self._note("commit", _own_name())

        def arrived(replicas: Any, name: str) -> None:
            source = name.split("/")[1]
            self._note("copies", _own_name(), source)
            if self._num_lures and self.cluster is not None:
                self._num_lures -= 1
                self.cluster.loop.call_later(0.004, self._kill, source, context=Context())

        def scheduled(scheduler: Any, *arguments: Any) -> None:
            if (used := scheduler.replicas.num_used) > self._used.get(_own_name(), 0):
                self._note("reuse", _own_name())
            self._used[_own_name()] = used

        _after(DecodeScheduler, "activate", activated)
        _after(Replicas, "arrived", arrived)
        _after(DecodeScheduler, "schedule", scheduled)


def _own_name() -> str:
    process = current_process()
    assert process is not None
    return process.name


def _after(owner: type, name: str, seen: Callable[..., None]) -> None:
    method = getattr(owner, name)

    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        seen(self, *arguments, **named)
        return result

    setattr(owner, name, watched)
