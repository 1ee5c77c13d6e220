"""Stores the state of requests in Redis in the background, for `pdserve trace` and as a fence between attempts.

`pd:req:{id}` is a hash with the state, the attempt, the history, the workers, the outcome and the decision record.
`pd:reqs` lists the newest requests and bounds how many are kept. A write is a compare-and-set on (state, attempt): it
is refused unless the mark in Redis is one that this request has passed. An older attempt or state therefore never
overwrites a newer one, and writes may be merged or dropped without blocking later ones. Of several requests with one
id, which clients may choose, the one that was accepted last is kept.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import from_json

from pdserve.base.errors import StaleAttempt, StoreError
from pdserve.base.ids import RequestId, WorkerId
from pdserve.base.logs import get_logger
from pdserve.observe.metrics import CounterSource
from pdserve.redis.store import Argument, Store, as_bytes, as_fields, as_list, script_command
from router_svc.records.request_state import RequestProgress, RequestState, StateChange

log = get_logger(__name__)

REQUEST_KEY = "req:"
REQUESTS_KEY = "reqs"
#: Bytes of a stored request. Decision records have some thousand.
_MAX_BYTES = 1 << 20

# KEYS: request, newest requests. ARGV: TTL in ms, requests to keep, key prefix, id, time of acceptance, number of
# accepted marks, the marks, field, value, ... Returns the stored mark if it is not an accepted one, else the empty
# string. A value that is no request is replaced.
_COMPARE_AND_SET = """
if type(redis.pcall('LLEN', KEYS[2])) == 'table' then redis.call('DEL', KEYS[2]) end
local found = redis.pcall('HMGET', KEYS[1], 'mark', 'accepted_at')
local stored, accepted_at = found[1], found[2] and tonumber(found[2])
local marks = tonumber(ARGV[6])
if found.err or (not accepted_at and (stored or found[2])) or (accepted_at and accepted_at < tonumber(ARGV[5])) then
  redis.call('DEL', KEYS[1])
  redis.call('LREM', KEYS[2], 1, ARGV[4])
  stored, accepted_at = false, nil
end
if accepted_at and accepted_at > tonumber(ARGV[5]) then return stored or '?' end
if stored then
  local accepted = false
  for i = 7, 6 + marks do
    if ARGV[i] == stored then accepted = true end
  end
  if not accepted then return stored end
else
  redis.call('LPUSH', KEYS[2], ARGV[4])
  while redis.call('LLEN', KEYS[2]) > tonumber(ARGV[2]) do
    redis.call('DEL', ARGV[3] .. redis.call('RPOP', KEYS[2]))
  end
end
redis.call('HSET', KEYS[1], unpack(ARGV, 7 + marks))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return ''
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest:
    """A request as stored in Redis. `record` is the decision record as JSON, empty while the request runs."""

    progress: RequestProgress
    record: str = ""


class RequestStore:
    """Writes requests while `run` runs. `put` never waits; writes beyond the queue's limit are dropped and counted."""

    def __init__(
        self,
        store: Store,
        *,
        max_queued: int = 1024,
        max_kept: int = 10_000,
        ttl_s: float = 3600.0,
        retry_s: float = 0.25,
        batch_size: int = 64,
    ) -> None:
        """At most `max_queued` requests wait to be written; Redis keeps the newest `max_kept`, for `ttl_s` each."""
        self._store = store
        self._max_queued = max_queued
        self._max_kept = max_kept
        self._ttl_s = ttl_s
        self._retry_s = retry_s
        self._batch_size = batch_size
        # Only the latest state of each request waits: its history includes the earlier ones.
        self._queued: dict[RequestId, StoredRequest] = {}
        self._due = asyncio.Event()
        #: Writes dropped because the queue was full.
        self.dropped = 0
        #: Writes that Redis refused because it holds a newer attempt or state.
        self.refused = 0

    def counters(self) -> list[CounterSource]:
        """What it counts, for metrics."""
        text = "Request records not written to Redis"
        return [CounterSource(name="request_records_dropped", text=text, value=lambda: self.dropped)]

    @property
    def queued(self) -> int:
        """Requests waiting to be written."""
        return len(self._queued)

    def put(self, progress: RequestProgress, record: str = "") -> None:
        """Queues a write. A later `put` of the same request replaces one that is still queued."""
        if progress.request_id not in self._queued and len(self._queued) >= self._max_queued:
            self.dropped += 1
            return
        self._queued[progress.request_id] = StoredRequest(progress=progress, record=record)
        self._due.set()

    async def run(self) -> None:
        """Writes until cancelled, then writes the rest of the queue if Redis is available."""
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                if not await self._flush():
                    self._due.set()
                    await asyncio.sleep(self._retry_s)
        finally:
            await self._flush()

    async def write(self, progress: RequestProgress, record: str = "") -> None:
        """Writes one request now.

        Raises:
            StaleAttempt: Redis holds a state that this request has not passed: another writer has advanced it.
            StoreError: Redis is unavailable.
        """
        [stored] = await self._write([StoredRequest(progress=progress, record=record)])
        if stored is not None:
            raise StaleAttempt(
                f"Request {progress.request_id} is {stored} in Redis; {progress.mark} may not overwrite it."
            )

    async def get(self, request_id: RequestId) -> StoredRequest | None:
        """The stored request, or None. Raises `StoreError`."""
        fields = as_fields(await self._store.call("HGETALL", self._store.key(REQUEST_KEY + request_id)))
        if (num_bytes := sum(map(len, fields.values()))) > _MAX_BYTES:
            raise StoreError(f"Request {request_id} in Redis has {num_bytes} bytes, more than any request.")
        return _from_fields(request_id, fields) if fields else None

    async def newest(self, count: int) -> list[RequestId]:
        """The ids of the newest requests, newest first. The last ones may have expired. Raises `StoreError`."""
        reply = await self._store.call("LRANGE", self._store.key(REQUESTS_KEY), 0, count - 1)
        return [RequestId(as_bytes(request_id).decode(errors="replace")) for request_id in as_list(reply)]

    async def _flush(self) -> bool:
        """Writes the queue in batches. False if Redis is unavailable; the rest then stays queued."""
        while self._queued:
            batch = list(itertools.islice(self._queued.values(), self._batch_size))
            try:
                stored = await self._write(batch)
            except StoreError:
                return False
            self.refused += sum(mark is not None for mark in stored)
            for request in batch:
                # A later state may have replaced it during the write.
                if self._queued.get(request.progress.request_id) is request:
                    del self._queued[request.progress.request_id]
        return True

    async def _write(self, requests: Sequence[StoredRequest]) -> list[str | None]:
        """For each request, the stored mark that made Redis refuse it, or None if it was written."""
        replies = await self._store.pipeline([self._command(request) for request in requests])
        return [as_bytes(reply).decode(errors="replace") or None for reply in replies]

    def _command(self, request: StoredRequest) -> list[Argument]:
        progress = request.progress
        marks = [step.mark for step in progress.history]
        fields = [text for field in _to_fields(request).items() for text in field]
        return script_command(
            _COMPARE_AND_SET,
            keys=[self._store.key(REQUEST_KEY + progress.request_id), self._store.key(REQUESTS_KEY)],
            arguments=[
                int(self._ttl_s * 1000),
                self._max_kept,
                self._store.key(REQUEST_KEY),
                progress.request_id,
                repr(progress.history[0].at),
                len(marks),
                *marks,
                *fields,
            ],
        )


def _to_fields(request: StoredRequest) -> dict[str, str]:
    progress = request.progress
    return {
        "mark": progress.mark,
        "accepted_at": repr(progress.history[0].at),
        "state": progress.state,
        "attempt": str(progress.attempt),
        "history": json.dumps([asdict(step) for step in progress.history]),
        "prefill_worker": progress.prefill_worker or "",
        "decode_worker": progress.decode_worker or "",
        "outcome": progress.outcome,
        "record": request.record,
    }


def _from_fields(request_id: RequestId, fields: dict[str, bytes]) -> StoredRequest:
    try:
        steps: list[dict[str, Any]] = from_json(fields["history"], allow_inf_nan=False)
        history = tuple(
            StateChange(state=RequestState(step["state"]), attempt=int(step["attempt"]), at=float(step["at"]))
            for step in steps
        )
        if not history:
            raise ValueError("the history is empty")
        progress = RequestProgress(
            request_id=request_id,
            history=history,
            prefill_worker=WorkerId(fields["prefill_worker"].decode()) or None,
            decode_worker=WorkerId(fields["decode_worker"].decode()) or None,
            outcome=fields["outcome"].decode(),
        )
        return StoredRequest(progress=progress, record=fields["record"].decode())
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"Request {request_id} in Redis cannot be parsed: {error!r:.300}.") from error
