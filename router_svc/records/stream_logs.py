"""The streams of a router that others can resume: writes them to Redis in the background, and reads those of others.

Nothing waits for Redis while tokens flow. What was not written when a router is lost is made again, and a stream that
Redis has lost goes on; it cannot be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from pdserve.base.errors import NotFound, StoreError
from pdserve.observe.metrics import CounterSource
from pdserve.redis.store import Argument, Reply, Store, as_bytes, as_list
from router_svc.records.resumable import Charge, Resumable, request_from_bytes
from router_svc.records.stream_log import (
    MAX_OUTPUT_BYTES,
    Ending,
    Found,
    LogEvents,
    StreamKey,
    StreamLog,
    open_request,
)
from router_svc.records.stream_scripts import LOOK, READ, TAKE, WRITE
from router_svc.records.stream_seal import StreamSeal

STREAM_KEY, OUTPUT_KEY = "stream:", "stream-output:"
#: Requests with more tokens are not kept.
_MAX_REQUEST_TOKENS = 1 << 20
#: Bytes of a stream that is read from Redis, with seals and small pieces.
_MAX_READ_BYTES = 4 * MAX_OUTPUT_BYTES
_MAX_READERS = 4
#: Tokens are collected for this long. When a router is lost, these tokens have to be made again.
_INTERVAL_S = 0.2
_BATCH = 64
#: Name, tokens and period of what a request has reserved of the limits of its key.
_LEASE = re.compile(rb"[0-9a-f]{32}:[0-9]{1,15}:[0-9]{1,15}")
#: Streams are renewed this often, so that a router whose stream was resumed elsewhere finds out.
_RENEWAL_S = 1.0
#: A request that ends waits this long for Redis.
_END_TIMEOUT_S = 1.0
#: Ended requests that wait for Redis to be back.
_MAX_ENDED = 1024
#: Values of `lost`: why output of a stream is not kept.
LOSSES = ("too_large", "store", "replaced")


class StreamLogs:
    """All streams of one router. Belongs to the event loop."""

    def __init__(self, store: Store, seal: StreamSeal, *, ttl_s: float, interval_s: float = _INTERVAL_S) -> None:
        """`ttl_s`: time for which a stream can be resumed after its last write; 0: streams are not kept."""
        self._store = store
        self._seal = seal
        self._ttl_s = ttl_s
        self._interval_s = interval_s
        self._open: dict[StreamLog, None] = {}
        self._due: dict[StreamLog, None] = {}
        self._has_due = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._events = LogEvents(due=self._is_due, take=self._take, stopped=self._stopped)
        #: Bounds how many streams are read at a time.
        self._reading = asyncio.Semaphore(_MAX_READERS)
        #: Streams that cannot be resumed with all of their output, by reason.
        self.lost: Counter[str] = Counter()
        #: Streams that other routers have resumed while they ran here.
        self.taken = 0
        #: Streams that were resumed here.
        self.resumed = 0

    @property
    def is_on(self) -> bool:
        """Whether streams are kept."""
        return self._ttl_s > 0

    def counters(self) -> list[CounterSource]:
        """What it counts, for metrics."""
        return [
            CounterSource(name="streams_resumed", text="Streams resumed on this router", value=lambda: self.resumed),
            CounterSource(
                name="streams_taken",
                text="Streams that clients have resumed elsewhere while they ran on this router",
                value=lambda: self.taken,
            ),
            CounterSource(
                name="streams_not_kept",
                text="Streams of which output is not kept in Redis, which is made again if they are resumed",
                value=lambda: self.lost.total(),
            ),
        ]

    def new(self, owner: str, resumable: Resumable) -> StreamLog | None:
        """The log of a request that is about to be accepted; None: it is not kept. The caller ends it."""
        prompt_tokens = sum(len(generation.prompt) for generation in resumable.generations)
        if not self.is_on:
            return None
        if prompt_tokens > _MAX_REQUEST_TOKENS:
            self.lost["too_large"] += 1
            return None
        return StreamLog(resumable, self._key(owner, resumable.shape.header_id), self._seal, self._events)

    def _key(self, owner: str, header_id: str) -> StreamKey:
        # Tenants are names of any form, and one must never find the stream of another one.
        name = f"{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}:{header_id}"
        return StreamKey(stream=self._store.key(STREAM_KEY + name), output=self._store.key(OUTPUT_KEY + name))

    def _is_due(self, log: StreamLog) -> None:
        self._open[log] = None
        self._due[log] = None
        self._has_due.set()
        if log.is_urgent:
            self._is_urgent.set()

    def _stopped(self, reason: str) -> None:
        self.lost[reason] += 1

    async def end(self, log: StreamLog, ending: Ending, charge: Charge) -> None:
        """Ends a log. Afterwards `log.is_ours` says whether this router may charge for it."""
        if not self._store.available:
            log.give_up()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await log.end(ending, charge)
        except TimeoutError:
            log.give_up()

    async def find(self, owner: str, header_id: str, name: str) -> tuple[StreamLog, bool] | None:
        """A stream of this owner, and whether it is complete; None: there is no such stream.

        The stream stays on its router until `StreamLog.take`. `name`: its nonce's start, or empty. Raises `StoreError`.
        """
        key = self._key(owner, header_id)
        if (read := await self._read(LOOK, key, name)) is None:
            return None
        found, sealed = read
        self.resumed += found.is_complete
        request = open_request(self._seal, sealed, found.nonce)
        resumable = request_from_bytes(request, suffix=secrets.token_hex(4))
        return StreamLog(resumable, key, self._seal, self._events, found), found.is_complete

    async def _take(self, log: StreamLog) -> Found:
        read = await self._read(TAKE, log.key, log.nonce)
        if read is None:
            raise NotFound("The stream has ended meanwhile, and cannot be resumed any more. Send the request again.")
        self._open[log] = None
        self.resumed += 1
        return read[0]

    async def _read(self, what: str, key: StreamKey, name: str) -> tuple[Found, bytes] | None:
        """What is in Redis, and the sealed request. Raises `StoreError`."""
        ttl_ms = int(max(self._ttl_s, 1.0) * 1000)
        arguments: list[Argument] = [what, name, ttl_ms, _MAX_READ_BYTES]
        async with self._reading:
            reply = as_list(await self._store.script(READ, keys=[key.stream, key.output], arguments=arguments))
        found = [as_bytes(item) for item in reply]
        if not found:
            return None
        if len(found) == 1:
            raise StoreError(f"The stream in Redis has {int(found[0])} bytes, more than any stream of ours.")
        [nonce, fence, state, charged, lease, sealed], pieces = found[:6], found[6:]
        try:
            nonce_text, number = nonce.decode("ascii"), int(fence)
            if lease and not _LEASE.fullmatch(lease):
                raise ValueError(f"{lease[:40]!r} is no lease")
        except ValueError as error:
            raise StoreError(f"The stream in Redis cannot be read: {error!r:.300}.") from error
        return Found(
            nonce=nonce_text,
            fence=number,
            is_complete=state == Ending.COMPLETE.value.encode(),
            pieces=tuple(pieces),
            charge=Charge.from_text(charged),
            lease=lease.decode(),
        ), sealed

    async def run(self) -> None:
        """Writes until cancelled, then what is left, if Redis is available."""
        loop = asyncio.get_running_loop()
        renewal_s = min(_RENEWAL_S, self._ttl_s / 4)
        renew_at = loop.time() + renewal_s
        try:
            while self.is_on:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(renew_at):
                        await self._has_due.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._is_urgent.wait()
                if loop.time() >= renew_at:
                    renew_at = loop.time() + renewal_s
                    self._due |= self._open
                self._has_due.clear()
                self._is_urgent.clear()
                if not await self._flush():
                    self._has_due.set()
                    await asyncio.sleep(self._interval_s)
        finally:
            await self._flush()

    async def _flush(self) -> bool:
        """Writes everything that is due. False if Redis is not available; it is due again then."""
        while self._due:
            batch = list(islice(self._due, _BATCH))
            for log in batch:
                del self._due[log]
            try:
                replies = await self._write(batch)
            except StoreError:
                self._due = dict.fromkeys(batch) | self._due
                self._drop_ended()
                return False
            for log, reply in zip(batch, replies, strict=True):
                self._answered(log, as_bytes(reply))
        return True

    async def _write(self, logs: Sequence[StreamLog]) -> list[Reply]:
        keys = [key for log in logs for key in (log.key.stream, log.key.output)]
        arguments = [argument for log in logs for argument in log.write()]
        replies = as_list(await self._store.script(WRITE, keys=keys, arguments=[int(self._ttl_s * 1000), *arguments]))
        if len(replies) != len(logs):
            raise StoreError(f"Redis has answered {len(replies)} of {len(logs)} writes of streams.")
        return replies

    def _answered(self, log: StreamLog, reply: bytes) -> None:
        was_ours = log.is_ours
        if log.answered(reply):
            self._due[log] = None
        self.taken += was_ours and not log.is_ours
        if log.is_over:
            self._open.pop(log, None)
            self._due.pop(log, None)

    def _drop_ended(self) -> None:
        """Forgets the oldest streams whose requests have ended while Redis was away, beyond a limit."""
        ended = [log for log in self._open if log.has_ended]
        for log in ended[:-_MAX_ENDED]:
            del self._open[log]
            self._due.pop(log, None)
