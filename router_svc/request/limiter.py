"""Enforces the limits of keys: shared by all routers in Redis, by this router alone while Redis is away.

A request reserves tokens before it is admitted, in one round trip. After its end the limiter's own task settles the
reservation: requests come and go with their clients, and a cancelled request must not leave a settlement half done. A
reservation is a lease: if its router was killed, it is given back when it ends. Keys without limits cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain

from pdserve.base.errors import StoreError
from pdserve.redis.store import Argument, Store, as_bytes, script_command
from router_svc.request.client import Client
from router_svc.request.limit_answers import refusal, too_many, verdict_of
from router_svc.request.limit_scripts import ADOPT, RENEW, RESERVE, SETTLE
from router_svc.request.limits import (
    Bucket,
    Limit,
    Limits,
    Verdict,
    full,
    period_starts,
    rate_headers,
    refilled,
    reserve,
    settled,
)

STATE_KEY = "limits:"
LEASES_KEY = "leases:"
#: Requests that wait to be settled. Of more, the oldest are not settled: their leases end.
_MAX_UNSETTLED = 10_000
#: Settlements in one round trip, which take some 10 ms of Redis.
_BATCH = 500
_RENEWALS_PER_LEASE = 3
#: Time that a request may wait until the one before it is settled, which is the time of two calls to Redis.
_SETTLE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReservation:
    """Tokens that one request may use. `lease` is its name in Redis; empty: only this router knows of it."""

    client: Client
    limits: Limits
    tokens: int
    lease: str = ""
    period: str = "0"


@dataclass(slots=True, kw_only=True)
class _Settlement:
    reservation: LimitReservation
    used: int
    #: Whether Redis settles only a lease that is there: this may be done already, or the lease was never made.
    needs_lease: bool = False
    #: Set when Redis has the settlement, or has failed to take it.
    tried: asyncio.Event = field(default_factory=asyncio.Event)


class Limiter:
    """The limits of all keys, as one router enforces them. Belongs to the event loop."""

    def __init__(self, store: Store, *, lease_s: float = 60.0, clock: Callable[[], float] = time.time) -> None:
        """A reservation of a router that is lost counts for `lease_s`."""
        self._store = store
        self._lease_ms = int(lease_s * 1000)
        self._clock = clock
        #: What each key had left when this router last saw it.
        self._seen: dict[str, Bucket] = {}
        self._running: Counter[str] = Counter()
        self._leases: dict[str, LimitReservation] = {}
        self._unsettled: deque[_Settlement] = deque()
        #: Settlements on their way to Redis. Only `run` sends them.
        self._sent: list[_Settlement] = []
        #: Settlements of requests that have ended and are about to be settled.
        self._ending: dict[str, _Settlement] = {}
        self._due = asyncio.Event()
        #: Requests that were decided without Redis.
        self.decided_alone = 0

    async def reserve(self, client: Client, tokens: int) -> LimitReservation | None:
        """The reservation of a request, or None for a key without limits. Raises `RateLimited`."""
        limits = client.limits
        if limits is None:
            return None
        ended = self._ended(client)
        reservation, verdict = await self._decide(client, limits, tokens)
        ended = ended or self._ended(client)
        if verdict.refused_by is Limit.PARALLEL and ended is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_WAIT_S):
                    await ended.tried.wait()
            reservation, verdict = await self._decide(client, limits, tokens)
        self._seen[client.id] = verdict.bucket
        if verdict.refused_by is not None:
            raise refusal(client, limits, tokens, verdict)
        return self._hold(reservation)

    def _hold(self, reservation: LimitReservation) -> LimitReservation:
        self._running[reservation.client.id] += 1
        if reservation.lease:
            self._leases[reservation.lease] = reservation
        return reservation

    async def adopt(self, client: Client, lease: str) -> LimitReservation | None:
        """The reservation of a request that another router has admitted. It is not made again, but counts as running.

        Raises `RateLimited`.
        """
        limits = client.limits
        if limits is None:
            return None
        _, tokens, period = lease.rsplit(":", 2)
        adopted = LimitReservation(client=client, limits=limits, tokens=int(tokens), lease=lease, period=period)
        arguments: list[Argument] = [self._lease_ms, limits.parallel, lease, f"{uuid.uuid4().hex}:0:{period}"]
        try:
            name = as_bytes(await self._store.script(ADOPT, keys=self._keys(client)[1:], arguments=arguments)).decode()
        except StoreError:
            self.decided_alone += 1
            return self._hold(adopted)
        if not name:
            raise too_many(client, limits, self._clock())
        return self._hold(adopted if name == lease else replace(adopted, tokens=0, lease=name))

    def ends(self, reservation: LimitReservation | None) -> None:
        """The request has ended: `settle` or `hand_over` follows soon."""
        if reservation is not None and reservation.lease:
            self._ending[reservation.lease] = _Settlement(reservation=reservation, used=0)

    def hand_over(self, reservation: LimitReservation | None) -> None:
        """The request runs on under another router, which settles it."""
        if reservation is not None:
            self._let_go(reservation)
            self._ending.pop(reservation.lease, _Settlement(reservation=reservation, used=0)).tried.set()

    def _let_go(self, reservation: LimitReservation) -> None:
        client = reservation.client.id
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        if self._leases.get(reservation.lease) is reservation:  # Its stream may have been resumed on this router.
            del self._leases[reservation.lease]

    def settle(self, reservation: LimitReservation | None, used: int) -> None:
        """A request has ended and has used so many tokens. Never waits."""
        if reservation is None:
            return
        self._let_go(reservation)
        if (bucket := self._seen.get(reservation.client.id)) is not None:
            self._seen[reservation.client.id] = settled(bucket, reservation.limits, reservation.tokens, used)
        if reservation.lease:
            settlement = self._ending.pop(reservation.lease, None) or _Settlement(reservation=reservation, used=0)
            settlement.used = used
            self._put(settlement)

    def headers(self, client: Client) -> dict[str, str]:
        """What the client has left, for its next answer: as this router last saw it."""
        if client.limits is None:
            return {}
        now = self._clock()
        bucket = self._seen.get(client.id) or full(client.limits, now)
        return rate_headers(refilled(bucket, client.limits, now), client.limits)

    async def run(self) -> None:
        """Settles and renews until cancelled, then settles the rest."""
        loop = asyncio.get_running_loop()
        interval_s = self._lease_ms / 1000 / _RENEWALS_PER_LEASE
        renew_at = loop.time() + interval_s
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(renew_at):
                        await self._due.wait()
                self._due.clear()
                if await self._settle_batch():
                    self._due.set()
                # Leases are renewed even while requests end all the time.
                if loop.time() >= renew_at:
                    renew_at = loop.time() + interval_s
                    await self._renew()
        finally:
            while await self._settle_batch():
                pass

    def _put(self, settlement: _Settlement) -> None:
        if len(self._unsettled) >= _MAX_UNSETTLED:
            self._unsettled.popleft().tried.set()
        self._unsettled.append(settlement)
        self._due.set()

    def _ended(self, client: Client) -> _Settlement | None:
        """The first request of the client that has ended and of which Redis may not know yet."""
        waiting = chain(self._sent, self._unsettled, self._ending.values())
        return next((each for each in waiting if each.reservation.client.id == client.id), None)

    async def _decide(self, client: Client, limits: Limits, tokens: int) -> tuple[LimitReservation, Verdict]:
        if self._store.available:
            try:
                return await self._decide_in_redis(client, limits, tokens)
            except StoreError:
                pass
        self.decided_alone += 1
        now = self._clock()
        bucket = self._seen.get(client.id) or full(limits, now)
        verdict = reserve(bucket, limits, tokens, self._running[client.id], now)
        return LimitReservation(client=client, limits=limits, tokens=tokens), verdict

    async def _decide_in_redis(self, client: Client, limits: Limits, tokens: int) -> tuple[LimitReservation, Verdict]:
        name = uuid.uuid4().hex
        starts = period_starts(limits.budget_period, self._clock())
        arguments: list[Argument] = [
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.parallel,
            limits.budget,
            self._lease_ms,
            name,
            tokens,
            *starts,
        ]
        reserved = LimitReservation(client=client, limits=limits, tokens=tokens)
        try:
            reply = await self._store.script(RESERVE, keys=self._keys(client), arguments=arguments)
        except BaseException:
            # The client has left, or Redis was too slow. Redis may have the lease, in any of these periods.
            for start in starts:
                self._put(_Settlement(reservation=_leased(reserved, name, str(start * 1000)), used=0, needs_lease=True))
            raise
        verdict, period = verdict_of(reply, self._clock())
        return _leased(reserved, name, period), verdict

    def _keys(self, client: Client) -> list[str]:
        return [self._store.key(STATE_KEY + client.id), self._store.key(LEASES_KEY + client.id)]

    async def _settle_batch(self) -> bool:
        """Settles the requests that have waited longest. Returns whether Redis may take more now.

        While Redis is away they stay due. They are tried again when a request ends or leases are renewed.
        """
        batch = [self._unsettled.popleft() for _ in range(min(len(self._unsettled), _BATCH))]
        if not batch:
            return False
        self._sent = batch
        try:
            await self._store.pipeline([self._settle_command(each) for each in batch])
        except BaseException as error:
            for each in batch:
                each.needs_lease = True
            # The batch goes behind the others: settlements that Redis refuses must not hold these up.
            self._unsettled.extend(batch)
            if isinstance(error, StoreError):
                return False
            raise
        finally:
            self._sent = []
            for each in batch:
                each.tried.set()
        return bool(self._unsettled)

    def _settle_command(self, settlement: _Settlement) -> list[Argument]:
        reservation = settlement.reservation
        return script_command(
            SETTLE,
            keys=self._keys(reservation.client),
            arguments=[
                reservation.limits.tokens_per_minute,
                reservation.lease,
                reservation.tokens,
                settlement.used,
                reservation.period,
                int(settlement.needs_lease),
            ],
        )

    async def _renew(self) -> None:
        by_key: dict[str, list[str]] = {}
        for lease, reservation in self._leases.items():
            by_key.setdefault(self._keys(reservation.client)[1], []).append(lease)
        commands = [
            script_command(RENEW, keys=[key], arguments=[self._lease_ms, *leases[at : at + 1000]])
            for key, leases in by_key.items()
            for at in range(0, len(leases), 1000)
        ]
        if commands:
            with contextlib.suppress(StoreError):
                await self._store.pipeline(commands)


def _leased(reservation: LimitReservation, name: str, period: str) -> LimitReservation:
    """The reservation with its lease, which is counted in the period that starts at `period`, in ms."""
    return replace(reservation, lease=f"{name}:{reservation.tokens}:{period}", period=period)
