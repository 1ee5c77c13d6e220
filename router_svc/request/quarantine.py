"""Whether a request in whose steps workers fail goes on, goes on in steps of its own, or ends. Pure.

    in company --2 failures--> alone --1 more, or one in the other tier--> over

Only a failure that the worker reports itself counts: it names the requests of its step. A worker that is killed, or
whose machine is lost, blames none. After the first failure, recovery keeps the request in that worker's tier.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from pdserve.base.errors import Quarantined
from pdserve.peers.workers import Tier
from router_svc.generation import Generation

#: Failures in steps with other requests until a request runs in steps of its own, and failures in those until it ends.
MAX_IN_COMPANY = 2
MAX_ALONE = 1
#: Time for which a request is refused after its failures have ended it.
REFUSED_S = 600.0
#: Requests that are refused at a time, at most: of one router, and of all others together.
MAX_REFUSED = 1024
DIGEST_BYTES = 16
#: Routers know the end of a refusal this exactly. Ends that differ by less belong to the same refusal.
_SAME_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """The workers that have failed by themselves in a step that computed one request."""

    count: int = 0
    #: How many of the workers failed in a step of the request's own.
    alone: int = 0
    #: Tier of the worker that failed first.
    tier: Tier | None = None
    #: A worker of the other tier has failed, too.
    is_in_both_tiers: bool = False

    def after(self, tier: Tier) -> Deaths:
        """The deaths after one more, of a worker of this tier."""
        return replace(
            self,
            count=self.count + 1,
            alone=self.alone + self.is_alone,
            tier=self.tier or tier,
            is_in_both_tiers=self.is_in_both_tiers or self.tier not in (None, tier),
        )

    def known(self, *, count: int, alone: int) -> Deaths:
        """The deaths, with those under equal requests at all routers, if these are more."""
        return replace(self, count=max(self.count, count), alone=max(self.alone, alone))

    @property
    def is_alone(self) -> bool:
        """Whether workers compute the request in steps of its own."""
        return self.count >= MAX_IN_COMPANY

    @property
    def is_over(self) -> bool:
        """Whether no worker gets the request any more."""
        return self.alone >= MAX_ALONE or self.is_in_both_tiers

    def may_reach(self, tier: Tier) -> bool:
        """Whether recovery may let workers of this tier compute the prompt."""
        return self.tier in (None, tier)

    @property
    def remark(self) -> str:
        """What the deaths mean for later attempts, for the decision record; empty: nothing."""
        where = f"stays in the {self.tier} tier" if self.tier is not None else ""
        return ", ".join(filter(None, (where, "in steps of its own" if self.is_alone else "")))


async def _of_one_router(digest: bytes, worker: str, alone: bool) -> tuple[int, int]:
    return 0, 0


class Quarantine:
    """Requests that are refused for a time. `now` is any monotonic clock."""

    def __init__(self, key: bytes = b"", model: str = "") -> None:
        """`key`: key of the digests, at most 64 bytes. Another key or another model gives a request another digest."""
        self._key = key
        self._person = hashlib.blake2b(model.encode(), digest_size=hashlib.blake2b.PERSON_SIZE).digest()
        #: Ends of this router's refusals by the requests' digests, in order. No refusal of another router evicts one.
        self._own: OrderedDict[bytes, float] = OrderedDict()
        #: Ends of the refusals of other routers, in order.
        self._shared: OrderedDict[bytes, float] = OrderedDict()
        #: Called with the digest of a request that is refused from now on, for the other routers.
        self.on_add: Callable[[bytes], None] = lambda digest: None
        #: Called with a digest, the name of a worker that has failed by itself under an equal request, and whether the
        #: request was alone in its step. Returns how many workers have failed so at all routers, as far as is known,
        #: and in how many of these failures the request was alone.
        self.on_death: Callable[[bytes, str, bool], Awaitable[tuple[int, int]]] = _of_one_router

    async def shared(self, generation: Generation, deaths: Deaths, worker: str, *, alone: bool) -> Deaths:
        """The deaths under this request, with those under equal requests. `worker` has failed last."""
        count, num_alone = await self.on_death(self._digest(generation), worker, alone)
        return deaths.known(count=count, alone=num_alone)

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
