"""The cluster of a modelled saga: its workers, time, and what the client has. What happens in it the search decides."""

from __future__ import annotations

from collections.abc import Collection, Generator, Hashable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from pdserve.base.errors import PeerLost
from pdserve.base.ids import Epoch, RouterId
from pdserve.base.sampling import SAMPLING_VERSION
from pdserve.peers.workers import Tier, WorkerRecord
from router_svc.routing.in_flight import InFlight
from router_svc.routing.incarnation import incarnation_of
from tests.model_check.search import Broken
from tests.support.records import ME, worker_record

_LIMIT_S, _LONG_S = 30.0, 1000.0
_LOSSES = ("lost", "lost-own", "prefill-lost", "prefill-lost-later")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The cluster, what may happen in it, and what of that happens by itself sooner or later."""

    decode: int = 2
    prefill: int = 1
    #: Decisions that are never made.
    never: frozenset[str] = frozenset()
    fair: frozenset[str] = frozenset({"done", "ticket", "started", "committed", "scored", "time", "pause"})
    losses: int = 2
    tokens: int = 1
    #: The prompt is scored before anything else.
    scores: bool = False


def _record(name: str, tier: Tier) -> WorkerRecord:
    return replace(worker_record(name, tier=tier), sampling_version=SAMPLING_VERSION)


class Waiting:
    """What the coroutine waits for: one of the decisions."""

    def __init__(self, *decisions: str) -> None:
        self.decisions = decisions

    def __await__(self) -> Generator[tuple[str, ...], str, str]:
        decision = yield self.decisions
        return decision


class Nothing:
    """Metrics, a store, a trace: whatever is called, nothing happens."""

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def __call__(self, *arguments: object, **named: object) -> Any:
        return Nothing()


class Output:
    """How much the client has."""

    is_finished = False

    def __init__(self) -> None:
        self.completion_tokens = 0

    def gain(self, tokens: int) -> None:
        """The client has at least this many tokens."""
        self.completion_tokens = max(tokens, self.completion_tokens)

    @property
    def has_tokens(self) -> bool:
        return self.completion_tokens > 0

    has_first_tokens = has_tokens

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return (7,)[: self.completion_tokens]

    @property
    def continuation(self) -> tuple[Any, ...]:
        return ()

    def forget_early(self) -> None:
        """There is nothing to forget."""


class SagaCluster:
    """The cluster as one request sees it."""

    def __init__(self, bounds: Bounds) -> None:
        self.now = 0.0
        self.output = Output()
        self.ready_until: dict[Tier, float] = {"decode": 0.0, "prefill": 0.0}
        self.in_flight = InFlight(RouterId(ME))
        self._losses, self._tokens = bounds.losses, bounds.tokens
        tiers: tuple[tuple[Tier, int], ...] = (("decode", bounds.decode), ("prefill", bounds.prefill))
        names = [(tier, f"{tier[0]}{number}") for tier, count in tiers for number in range(count)]
        self._alive = {name: _record(name, tier) for tier, name in names}
        self._lost: dict[str, WorkerRecord] = {}
        self.directory = SimpleNamespace(
            degraded=False,
            mark_lost=self._mark_lost,
            mark_alive=lambda worker_id, epoch: None,
            version=0,
            wait_for_change=self._wait_for_change,
        )
        self.policy = SimpleNamespace(
            reserve_timeout_s=_LIMIT_S,
            max_lost_workers=100,
            worker_return_timeout_s=_LIMIT_S,
            may_change_numerics=True,
            expects_prefill=True,
            local_prefill_by_load=False,
            local_prefill_threshold=0,
            silence=SimpleNamespace(of_start=lambda worker: None),
            no_decode_worker="No decode worker is ready.",
        )
        #: Whether the worker that was lost last has named the request in its note.
        self._is_own = False
        #: Each worker once, and once more at first and after each new token.
        self._max_at_once = bounds.decode + bounds.tokens + 2
        #: Calls to decode workers since the last pause.
        self.at_once = 0
        self._last_attempt = self._last_scored = 0

    def key(self) -> Hashable:
        """All that decides what may happen next."""
        expected = tuple(self.now < until + _LIMIT_S for until in self.ready_until.values())
        alive = frozenset(map(incarnation_of, self._alive.values()))
        return alive, frozenset(self._lost), expected, self._losses, self._tokens, self.at_once

    async def decide(self, *decisions: str) -> str:
        """What happens next."""
        spent = {"token": self._tokens} | dict.fromkeys(_LOSSES, self._losses)
        decision = await Waiting(*(each for each in decisions if spent.get(each, 1)))
        self._losses -= decision in _LOSSES
        self._tokens -= decision == "token"
        return decision

    # What the saga asks.
    async def overlap(self, hashes: object) -> dict[object, int]:
        return {}

    async def requests_of_death(self, worker_id: object, epoch: object) -> Collection[str] | None:
        return ("r",) if self._is_own else None

    def ready(self, tier: Tier, layout: object = None) -> list[WorkerRecord]:
        return [each for each in self._alive.values() if each.tier == tier]

    def expects(self, tier: Tier) -> bool:
        return bool(self.ready(tier)) or self.now < self.ready_until[tier] + _LIMIT_S

    def sealed(self, purpose: object, worker: object, message: Any) -> Any:
        return message

    # What happens.
    def lose(self, worker: WorkerRecord, *, is_own: bool = False) -> PeerLost:
        """The error of a call to a worker that has died."""
        self._is_own = is_own
        error = PeerLost(f"Lost {worker.worker_id}.")
        error.__cause__ = ConnectionResetError()
        return error

    def _mark_lost(self, worker_id: object, epoch: object) -> None:
        worker = self._alive.pop(str(worker_id))
        self._lost[str(worker_id)] = worker
        self.ready_until[worker.tier] = self.now

    async def _wait_for_change(self, version: int) -> None:
        """A change, a heartbeat without one, or all limits pass."""
        self.at_once = 0
        decision = await Waiting("time", "heartbeat", *(f"return {name}" for name in self._lost))
        if decision == "time":
            self.now += _LONG_S
        elif decision != "heartbeat":
            before = self._lost.pop(decision.split()[1])
            again = replace(before, epoch=Epoch(before.epoch + 1))
            self._alive[str(before.worker_id)] = again

    # What must hold.
    def new_call(self) -> None:
        """A decode worker gets the request."""
        self.at_once += 1
        if self.at_once > self._max_at_once:
            raise Broken(f"{self.at_once} calls without a pause")

    def new_scoring(self, attempt: int) -> None:
        """A prefill worker is asked for scores."""
        if attempt <= self._last_scored:
            raise Broken(f"attempt {attempt} asks for scores after attempt {self._last_scored}: it is stale")
        self._last_scored = attempt

    def new_attempt(self, attempt: int) -> None:
        """A worker hears of an attempt for the first time."""
        if attempt <= self._last_attempt:
            raise Broken(f"attempt {attempt} starts after attempt {self._last_attempt}: it is stale")
        self._last_attempt = attempt
