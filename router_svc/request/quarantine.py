"""Whether a request under which workers die goes on, goes on in steps of its own, or ends. Pure.

    in company --2 deaths of the first kind, or 3 of the second--> alone --1 of the first, or 3 of the second--> over

A death of the first kind is a worker's own failure in a step with the request; all others are of the second kind, such
as SIGKILL, or a lost machine. After one of the first kind, recovery keeps the request in that worker's tier. Of the
second kind, as many do not count as workers were lost meanwhile without the request, and none ends a request that may
well have met its deaths by chance.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from pdserve.base.errors import Quarantined
from pdserve.base.workers import Tier
from router_svc.generation import Generation
from router_svc.request.losses import Losses
from router_svc.routing.incarnation import Incarnation

#: Deaths in company, after which the request runs in steps of its own.
MAX_OWN_IN_COMPANY = 2
MAX_MET_IN_COMPANY = 3
#: Deaths in steps of its own, after which the request ends.
MAX_OWN_ALONE = 1
MAX_MET_ALONE = 3
#: Deaths of the second kind end no request that has met them by chance with a higher probability than this one.
MAX_CHANCE = 1e-5
#: Time for which a request is refused after it has ended so.
REFUSED_S = 600.0
#: Requests that are refused at a time, at most: of one router, and of all others together.
MAX_REFUSED = 1024
DIGEST_BYTES = 16
#: Difference between two ends of the same refusal, as routers know it.
_SAME_S = 5.0


class Death(Enum):
    """How a worker was lost under a request."""

    #: It failed by itself, in a step that computed the request.
    OWN = auto()
    #: It was killed, its machine is gone, or it failed in a step without the request.
    MET = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """The workers that were lost under one request."""

    own: int = 0
    met: int = 0
    own_alone: int = 0
    met_alone: int = 0
    #: Tier of the first worker that has failed by itself.
    tier: Tier | None = None
    #: A worker of the other tier has failed by itself, too.
    is_in_both_tiers: bool = False

    def after(self, death: Death, tier: Tier) -> Deaths:
        """The deaths after one more, of a worker of this tier."""
        alone = self.is_alone
        if death is Death.MET:
            return replace(self, met=self.met + 1, met_alone=self.met_alone + alone)
        return replace(
            self,
            own=self.own + 1,
            own_alone=self.own_alone + alone,
            tier=self.tier or tier,
            is_in_both_tiers=self.is_in_both_tiers or self.tier not in (None, tier),
        )

    def known(self, *, own: int, own_alone: int) -> Deaths:
        """The deaths, with those of the first kind of equal requests at all routers, if these are more."""
        return replace(self, own=max(self.own, own), own_alone=max(self.own_alone, own_alone))

    @property
    def is_alone(self) -> bool:
        """Whether workers compute the request in steps of its own."""
        return self.own >= MAX_OWN_IN_COMPANY or self.met >= MAX_MET_IN_COMPANY

    @property
    def is_over(self) -> bool:
        """Whether no worker gets the request any more."""
        return self.own_alone >= MAX_OWN_ALONE or self.met_alone >= MAX_MET_ALONE or self.is_in_both_tiers

    def may_reach(self, tier: Tier) -> bool:
        """Whether recovery may let workers of this tier compute the prompt."""
        return self.tier in (None, tier)

    @property
    def remark(self) -> str:
        """What this means for later attempts, for the decision record; empty: nothing."""
        where = f"stays in the {self.tier} tier" if self.tier is not None else ""
        return ", ".join(filter(None, (where, "in steps of its own" if self.is_alone else "")))

    def __str__(self) -> str:
        return f"{self.own} failed by themselves while they computed it, {self.met} were lost for other reasons"


async def _of_one_router(digest: bytes, worker: str, alone: bool) -> tuple[int, int]:
    return 0, 0


class Quarantine:
    """Requests that are refused for a time. `now` is any monotonic clock."""

    def __init__(self, key: bytes = b"", model: str = "") -> None:
        """`key`: of the digests, at most 64 bytes. With another one, or another model, a request has another digest."""
        self._key = key
        self._person = hashlib.blake2b(model.encode(), digest_size=hashlib.blake2b.PERSON_SIZE).digest()
        #: Ends of this router's refusals by the requests' digests, in order. No refusal of another router evicts one.
        self._own: OrderedDict[bytes, float] = OrderedDict()
        #: Those of other routers, in order.
        self._shared: OrderedDict[bytes, float] = OrderedDict()
        #: Called with the digest of a request that is refused from now on, for the other routers.
        self.on_add: Callable[[bytes], None] = lambda digest: None
        #: Called with a digest, the name of a worker that has failed by itself under an equal request, and whether in a
        #: step of its own. Returns how many have, and how many of them in such steps, as far as routers know together.
        self.on_own_death: Callable[[bytes, str, bool], Awaitable[tuple[int, int]]] = _of_one_router
        #: Workers that the router has lost, whichever requests they had.
        self.losses = Losses()

    def lost(self, generation: Generation, worker: Incarnation, *, since: float, now: float) -> int:
        """Notes that this worker was lost under the request. Returns how many were lost since then without it."""
        digest = self._digest(generation)
        self.losses.add(worker, digest, now)
        return self.losses.without(digest, since)

    async def shared(self, generation: Generation, deaths: Deaths, worker: str, *, alone: bool) -> Deaths:
        """The deaths under this request, with those under equal ones. The last was `worker`'s, of the first kind."""
        own, own_alone = await self.on_own_death(self._digest(generation), worker, alone)
        return deaths.known(own=own, own_alone=own_alone)

    def add(self, generation: Generation, now: float) -> None:
        """Refuses the request from now on."""
        digest = self._digest(generation)
        self._own.pop(digest, None)
        self._own[digest] = now + REFUSED_S
        if len(self._own) > MAX_REFUSED:
            self._own.popitem(last=False)
        self.on_add(digest)

    def merge(self, refusals: Iterable[tuple[bytes, float]], now: float) -> None:
        """Refuses requests that other routers refuse: digests, and seconds until each refusal ends."""
        found = dict[bytes, float]()
        for digest, left_s in refusals:
            until = now + min(left_s, REFUSED_S)
            known = self._own.get(digest) or self._shared.get(digest, 0.0)
            if left_s > 0 and abs(known - until) >= _SAME_S:
                found[digest] = until
        if found:
            ends = sorted((self._shared | found).items(), key=lambda item: item[1])
            self._shared = OrderedDict(ends[-MAX_REFUSED:])

    def check(self, generation: Generation, now: float) -> None:
        """Raises `Quarantined` for a request that is refused."""
        for ends in (self._own, self._shared):
            while ends and next(iter(ends.values())) <= now:
                ends.popitem(last=False)
        if not self._own and not self._shared:  # The usual case: nothing is computed.
            return
        digest = self._digest(generation)
        until = max(self._own.get(digest, now), self._shared.get(digest, now))
        if until > now:
            raise Quarantined(
                f"Workers have failed under this request, so it is refused for another {until - now:.0f} s "
                f"(limit {REFUSED_S:.0f} s). Change it, or report the failure of the workers."
            )

    def _digest(self, generation: Generation) -> bytes:
        """Equal for equal requests of one tenant for one model, whatever their ids and seeds."""
        sampling = repr(replace(generation.sampling, seed=0)).encode()
        digest = hashlib.blake2b(sampling, digest_size=DIGEST_BYTES, key=self._key, person=self._person)
        digest.update(array("q", generation.prompt).tobytes())
        digest.update(generation.cache_salt)
        return digest.digest()

    def __len__(self) -> int:
        return len(self._own.keys() | self._shared.keys())
