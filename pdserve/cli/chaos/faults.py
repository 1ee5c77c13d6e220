"""The plan of faults: what happens when, and to which process. Pure: the same seed gives the same plan.

A plan names no process, since only the run knows which ones are alive: each fault carries a number from 0 to 1 that
chooses among those that may be hit then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

#: Share of each kind in the plan. Those of kills add up to a third.
KINDS: Mapping[str, float] = {
    "kill-decode": 0.12,
    "kill-prefill": 0.10,
    "kill-pair": 0.03,
    "kill-router": 0.06,
    "kill-redis": 0.02,
    "flush-redis": 0.02,
    "stop-worker": 0.13,
    "stop-router": 0.07,
    "stop-redis": 0.05,
    "slow-reader": 0.11,
    "disconnect": 0.11,
    "full-kv": 0.06,
    "descriptors": 0.07,
    "files": 0.05,
}
DEFAULT_KINDS: tuple[str, ...] = tuple(KINDS)
#: Shortest and longest time that a fault lasts, where it lasts.
DURATIONS_S: Mapping[str, tuple[float, float]] = {
    "stop-worker": (0.2, 4.0),
    "stop-router": (0.2, 2.0),
    "stop-redis": (0.5, 4.0),
    "slow-reader": (1.0, 8.0),
    "descriptors": (0.5, 3.0),
    "files": (0.5, 3.0),
}
#: Seconds after the loss of what Redis had in which no router is killed: routers write again what streams need.
AFTER_REDIS_S = 5.0
PREFILL, DECODE, ROUTER, REDIS = "prefill", "decode", "router", "redis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planned fault. `at_s` counts from the start of the run."""

    at_s: float
    kind: str
    #: Chooses among the processes or requests that may be hit, 0 to 1.
    choice: float
    duration_s: float = 0.0
    #: Faults for the case that nothing may be hit by this one then, in order. A kill has kills.
    instead: tuple[Fault, ...] = ()

    @property
    def is_kill(self) -> bool:
        """Whether processes end by it."""
        return is_kill(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process that could be hit."""

    name: str
    tier: str
    #: Serves now: it has reported readiness since it was started, and no other fault holds it.
    is_ready: bool


def is_kill(kind: str) -> bool:
    """Whether processes end by faults of this kind."""
    return kind.startswith("kill-")


def plan(seed: int, *, interval_s: float, kinds: Sequence[str]) -> Iterator[Fault]:
    """Faults without end, on average one in `interval_s`, with exponential gaps."""
    rng = random.Random(f"faults:{seed}")
    weights = [KINDS[kind] for kind in kinds]
    at_s = 0.0
    while kinds:
        at_s += rng.expovariate(1 / interval_s)
        [kind] = rng.choices(kinds, weights)
        # The last workers of both tiers are not lost more often than planned.
        others = [each for each in kinds if is_kill(each) == is_kill(kind) and each not in (kind, "kill-pair")]
        rng.shuffle(others)
        fault, *instead = [_fault(rng, at_s, each) for each in (kind, *others)]
        yield replace(fault, instead=tuple(instead))


def _fault(rng: random.Random, at_s: float, kind: str) -> Fault:
    shortest_s, longest_s = DURATIONS_S.get(kind, (0.0, 0.0))
    return Fault(at_s=at_s, kind=kind, choice=rng.random(), duration_s=rng.uniform(shortest_s, longest_s))


def victims(fault: Fault, targets: Sequence[Target], *, since_redis_s: float, streams_have_routers: bool) -> list[str]:
    """Names of the processes to hit; none if nothing may be hit now.

    Only ready processes are hit, so that kills meet requests. A tier keeps a ready worker, and clients a ready router,
    except under `kill-pair`, which takes a worker of each tier even if it is the last. The supervisor restarts all of
    them, so a worker of each tier is always expected back. `since_redis_s`: since Redis last lost its data.
    `streams_have_routers`: no client has lost a router without being at another one since.
    """
    match fault.kind:
        case "kill-decode":
            return _choose(fault, _spare(targets, DECODE))
        case "kill-prefill":
            return _choose(fault, _spare(targets, PREFILL))
        case "kill-pair":
            return [*_choose(fault, _ready(targets, PREFILL)), *_choose(fault, _ready(targets, DECODE))]
        case "kill-router":
            return _choose(fault, _spare(targets, ROUTER) if since_redis_s > AFTER_REDIS_S else [])
        case "kill-redis" | "flush-redis":
            # A stream whose router is gone lives in Redis alone.
            is_spare = streams_have_routers and all(each.is_ready for each in targets if each.tier == ROUTER)
            return _choose(fault, _ready(targets, REDIS) if is_spare else [])
        case "stop-worker":
            return _choose(fault, [*_ready(targets, PREFILL), *_ready(targets, DECODE)])
        case "stop-router":
            return _choose(fault, _spare(targets, ROUTER))
        case "stop-redis":
            return _choose(fault, _ready(targets, REDIS))
        case "descriptors" | "files":
            return _choose(fault, [each.name for each in targets if each.is_ready and each.tier != REDIS])
    return []


def _ready(targets: Sequence[Target], tier: str) -> list[str]:
    return [each.name for each in targets if each.tier == tier and each.is_ready]


def _spare(targets: Sequence[Target], tier: str) -> list[str]:
    """The ready ones, if one of them may be lost."""
    ready = _ready(targets, tier)
    return ready if len(ready) > 1 else []


def _choose(fault: Fault, names: Sequence[str]) -> list[str]:
    return [names[int(fault.choice * len(names))]] if names else []
