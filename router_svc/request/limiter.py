"""Enforces the limits of keys: shared by all routers in Redis, by this router alone while Redis is away.

A request reserves before it is admitted, in one round trip, and settles after its end in the background. A reservation
is a lease: that of a router which was killed is given back when it ends. Keys without limits cost nothing.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.base.errors import QuotaExceeded, RateLimited, StoreError
from pdserve.base.store import Argument, Reply, Store, as_bytes, as_list, script_command
from router_svc.request.client import Client
from router_svc.request.limit_scripts import RENEW, RESERVE, SETTLE
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
#: Requests that wait to be settled. Beyond it the oldest are left to the end of their leases.
_MAX_UNSETTLED = 10_000
_RENEWALS_PER_LEASE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Tokens that one request may use. `lease` is its name in Redis; empty: only this router knows of it."""

    client: Client
    limits: Limits
    tokens: int
    lease: str = ""
    period: str = "0"


@dataclass(slots=True, kw_only=True)
class _Settlement:
    reservation: Reservation
    used: int
    #: Whether it may have been done: a reply was lost.
    is_retry: bool = False


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
        self._leases: dict[str, Reservation] = {}
        self._unsettled: list[_Settlement] = []
        self._due = asyncio.Event()
        self._settling = asyncio.Lock()
        #: Requests that were decided without Redis.
        self.decided_alone = 0

    async def reserve(self, client: Client, tokens: int) -> Reservation | None:
        """The reservation of a request, or None for a key without limits. Raises `RateLimited`."""
        limits = client.limits
        if limits is None:
            return None
        reservation, verdict = await self._decide(client, limits, tokens)
        if verdict.refused_by is Limit.PARALLEL and (self._unsettled or self._settling.locked()):
            # The request before it may have ended just now.
            await self._settle_all()
            reservation, verdict = await self._decide(client, limits, tokens)
        self._seen[client.id] = verdict.bucket
        if verdict.refused_by is not None:
            raise _refusal(client, limits, tokens, verdict)
        self._running[client.id] += 1
        if reservation.lease:
            self._leases[reservation.lease] = reservation
        return reservation

    def settle(self, reservation: Reservation | None, used: int) -> None:
        """A request has ended and has used so many tokens. Never waits."""
        if reservation is None:
            return
        client = reservation.client.id
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        if (bucket := self._seen.get(client)) is not None:
            self._seen[client] = settled(bucket, reservation.limits, reservation.tokens, used)
        if reservation.lease:
            del self._leases[reservation.lease]
            del self._unsettled[: max(len(self._unsettled) + 1 - _MAX_UNSETTLED, 0)]
            self._unsettled.append(_Settlement(reservation=reservation, used=used))
            self._due.set()

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
                try:
                    async with asyncio.timeout_at(renew_at):
                        await self._due.wait()
                except TimeoutError:
                    renew_at = loop.time() + interval_s
                    await self._renew()
                self._due.clear()
                await self._settle_all()
        finally:
            await self._settle_all()

    async def _decide(self, client: Client, limits: Limits, tokens: int) -> tuple[Reservation, Verdict]:
        if self._store.available:
            try:
                return await self._decide_in_redis(client, limits, tokens)
            except StoreError:
                pass
        self.decided_alone += 1
        now = self._clock()
        bucket = self._seen.get(client.id) or full(limits, now)
        verdict = reserve(bucket, limits, tokens, self._running[client.id], now)
        return Reservation(client=client, limits=limits, tokens=tokens), verdict

    async def _decide_in_redis(self, client: Client, limits: Limits, tokens: int) -> tuple[Reservation, Verdict]:
        name = uuid.uuid4().hex
        arguments: list[Argument] = [
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.parallel,
            limits.budget,
            self._lease_ms,
            name,
            tokens,
            *period_starts(limits.budget_period, self._clock()),
        ]
        reply = await self._store.script(RESERVE, keys=self._keys(client), arguments=arguments)
        verdict, period = _verdict(reply, self._clock())
        lease = f"{name}:{tokens}:{period}"
        return Reservation(client=client, limits=limits, tokens=tokens, lease=lease, period=period), verdict

    def _keys(self, client: Client) -> list[str]:
        return [self._store.key(STATE_KEY + client.id), self._store.key(LEASES_KEY + client.id)]

    async def _settle_all(self) -> None:
        """Settles what is due. While Redis is away it stays due, until the next renewal."""
        async with self._settling:
            batch, self._unsettled = self._unsettled, []
            if not batch:
                return
            try:
                await self._store.pipeline([self._settle_command(each) for each in batch])
            except StoreError:
                for each in batch:
                    each.is_retry = True
                self._unsettled[:0] = batch
            except BaseException:
                self._unsettled[:0] = batch
                raise

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
                int(settlement.is_retry),
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
            try:
                await self._store.pipeline(commands)
            except StoreError:
                return


def _verdict(reply: Reply, now: float) -> tuple[Verdict, str]:
    """The script's answer. Raises `StoreError`."""
    fields: Sequence[str] = [as_bytes(item).decode(errors="replace") for item in as_list(reply)]
    try:
        reason, wait_ms, requests, tokens, budget, period = fields
        bucket = Bucket(requests=float(requests), tokens=float(tokens), budget=float(budget), at=now)
        refused_by = Limit(reason) if reason else None
        return Verdict(bucket=bucket, refused_by=refused_by, wait_s=float(wait_ms) / 1000), period
    except ValueError as error:
        raise StoreError(f"The limits in Redis cannot be parsed: {error!r:.200}.") from error


def _refusal(client: Client, limits: Limits, tokens: int, verdict: Verdict) -> RateLimited:
    """The error for the client: the limit, its value, what was asked for, and what to do."""
    wait = f"Retry after {max(verdict.wait_s, 1.0):.0f} s"
    match verdict.refused_by:
        case Limit.PARALLEL:
            text = f"has {limits.parallel} requests at a time, which is its limit. {wait}, or when one has ended."
        case Limit.REQUESTS:
            text = f"has used its {limits.requests_per_minute} requests per minute. {wait}."
        case Limit.TOKENS:
            left = max(int(verdict.bucket.tokens), 0)
            text = (
                f"has {left} of its {limits.tokens_per_minute} tokens per minute left, and this request may take "
                f"{tokens}. {wait}, or send a shorter prompt or a lower `max_tokens`."
            )
        case _:
            per = "" if limits.budget_period == "total" else f" per {limits.budget_period}"
            return QuotaExceeded(
                f"The API key {client.id} has used its budget of {limits.budget} tokens{per}. Ask the operator for "
                "more, or wait for the next period.",
                retry_after_s=verdict.wait_s,
            )
    return RateLimited(f"The API key {client.id} {text}", retry_after_s=max(verdict.wait_s, 1.0))
