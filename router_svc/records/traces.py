"""Finds the decision record of a request: in this router's memory, else in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pydantic_core import from_json

from pdserve.base.errors import StoreError
from pdserve.base.ids import RequestId
from router_svc.records.recent_records import RecentRecords
from router_svc.records.record_json import Json, as_json, brief_of
from router_svc.records.request_state import RequestProgress
from router_svc.records.request_store import RequestStore

#: Prefixes of response ids, one for each kind of endpoint.
ID_PREFIXES = ("chatcmpl-", "cmpl-", "gen-", "resp_", "msg_", "embd-", "score-", "rerank-", "dec-")


class Traces:
    """The decision records of recent requests, by id."""

    def __init__(self, recent: RecentRecords, store: RequestStore) -> None:
        self._recent = recent
        self._store = store

    def newest(self, limit: int, *, tenant: str | None = None) -> Iterator[dict[str, Json]]:
        """Briefs of at most `limit` requests in memory, the latest first; with `tenant`, of its own only.

        Each is made when it is taken: a thousand of them take the event loop too long at once.
        """
        if tenant is None:
            return map(brief_of, self._recent.newest(limit))
        own = (record for record in self._recent.newest() if record.tenant == tenant)
        return map(brief_of, islice(own, limit))

    async def get(self, request_id: str, *, tenant: str | None = None) -> dict[str, Json] | None:
        """The record as JSON, or None when neither memory nor Redis has it. Raises `StoreError`.

        With `tenant`, only its own records are found.

        The id may be the response's id or the X-Request-Id that the client sent.
        """
        candidates = [RequestId(prefix + request_id) for prefix in ("", *ID_PREFIXES)]
        for candidate in candidates:
            record = self._recent.get(candidate)
            if record is not None and tenant in (None, record.tenant):
                return as_json(record)
        for candidate in candidates:
            stored = await self._store.get(candidate)
            if stored is None:
                continue
            # Redis has the tenant of a request that has ended. Before that, its router answers.
            found = _parsed(candidate, stored.record) if stored.record else _unfinished(stored.progress)
            if tenant in (None, found.get("tenant")):
                return found
        return None


def _parsed(request_id: RequestId, text: str) -> dict[str, Json]:
    """The record as JSON. Raises `StoreError`: somebody else may have written it."""
    try:
        record = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise StoreError(f"The record of request {request_id} in Redis is no JSON: {error!s:.300}.") from error
    if not isinstance(record, dict):
        raise StoreError(f"The record of request {request_id} in Redis is no record.")
    return record


def _unfinished(progress: RequestProgress) -> dict[str, Json]:
    """The trace of a request whose router was lost before the request ended: only its history is known."""
    return {
        "request_id": progress.request_id,
        "accepted_at": progress.history[0].at,
        "state": progress.state.value,
        "attempt": progress.attempt,
        "story": progress.story(),
        "prefill_worker": progress.prefill_worker,
        "decode_worker": progress.decode_worker,
    }
