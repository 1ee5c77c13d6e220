"""The responses of this cluster that are stored, by their owner and id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.base.errors import NotFound, PdserveError, RequestError
from pdserve.base.logs import get_logger
from router_svc.api.responses.formatter import error_of
from router_svc.api.responses.request import Kept
from router_svc.records.stream_seal import StreamSeal
from router_svc.state.claim import Claim
from router_svc.state.response_record import (
    ResponseRecord,
    ShownResponse,
    record_from_bytes,
    record_key,
    record_to_bytes,
)
from router_svc.state.state_store import Stage, StateStore

log = get_logger(__name__)


class StoredResponses:
    """Reads and writes records. Belongs to the event loop."""

    def __init__(self, state: StateStore, seal: StreamSeal) -> None:
        self.state = state
        self._seal = seal

    async def find(self, tenant: str, response_id: str) -> ResponseRecord:
        """The record. Raises `NotFound`, also for that of another tenant, and `StoreError`."""
        record = await self.read(record_key(tenant, response_id))
        if record is None:
            raise NotFound(
                f"There is no response `{response_id[:100]}`: it was not stored, was deleted, or is too old.",
                param="id",
            )
        return record

    async def read(self, key: str) -> ResponseRecord | None:
        """The record of a key. Raises `StoreError`."""
        data = await self.state.read(key)
        return None if data is None else await asyncio.to_thread(record_from_bytes, data, key, self._seal)

    async def require_available(self) -> None:
        """Raises `StoreError` while the store is away or full, before a response is made that could not be stored."""
        await self.state.require_writable()

    async def require_not_running(self, tenant: str, response_id: str) -> None:
        """Raises `RequestError` if a response with this id runs in the background, and `StoreError`."""
        if await self.state.stage(record_key(tenant, response_id)) in (Stage.CLAIMED, Stage.LEFT):
            raise id_is_taken(response_id)

    async def keep(self, kept_text: str, response: ShownResponse, *, is_again: bool = False) -> bool:
        """Stores a response that has ended, with a `Kept` as JSON. `is_again`: another router may have stored it.

        False: it cannot be stored, or was deleted, and the client has the response anyway.
        """
        kept = Kept(**await asyncio.to_thread(json.loads, kept_text))
        record = ResponseRecord(
            tenant=kept.tenant,
            key_id=kept.key_id,
            response=response,
            items=kept.items,
            first_own_item=kept.first_own_item,
        )
        key = record_key(record.tenant, record.id)
        try:
            is_stored = await self.state.create(key, await self._packed(record, key), is_again=is_again)
        except PdserveError as error:
            log.warning("response_not_stored", id=record.id, reason=error)
            return False
        if not is_stored:
            log.info("response_not_stored", id=record.id, reason="it was deleted, or one in the background has its id")
        return is_stored

    async def create(self, record: ResponseRecord, *, holder: str) -> None:
        """Stores a record, which is new and open. Raises `RequestError` and `StoreError`."""
        key = record_key(record.tenant, record.id)
        if not await self.state.create(key, await self._packed(record, key), holder=holder):
            raise id_is_taken(record.id)

    async def update(self, record: ResponseRecord, claim: Claim) -> bool:
        """Changes an open record. False: it is no longer the claim's. Raises `TooLarge` and `StoreError`."""
        data = await self._packed(record, claim.key)
        return await self.state.update(claim.key, data, claim.holder, is_open=not record.is_terminal)

    async def end(self, record: ResponseRecord, claim: Claim, error: PdserveError | None = None) -> bool:
        """Ends a response that no router runs: it has failed, or was cancelled. Returns and raises as `update`."""
        status = "cancelled" if error is None else "failed"
        response = record.response.ended(status, None if error is None else error_of(error))
        return await self.update(replace(record, response=response), claim)

    async def before(self, tenant: str, previous_id: str) -> list[Mapping[str, Any]]:
        """The items of a conversation up to the end of a response. Raises `RequestError` and `StoreError`."""
        try:
            record = await self.find(tenant, previous_id)
        except NotFound as error:
            raise NotFound(f"`previous_response_id`: {error}", param="previous_response_id") from error
        if record.response.status not in ("completed", "incomplete"):
            raise RequestError(
                f"The response `{previous_id[:100]}` is {record.response.status}, so that no conversation can go on "
                "from it.",
                param="previous_response_id",
            )
        return [*record.items, *record.response.output]

    async def _packed(self, record: ResponseRecord, key: str) -> bytes:
        return await asyncio.to_thread(record_to_bytes, record, key, self._seal)


def id_is_taken(response_id: str) -> RequestError:
    """The error of a request with the id of another one."""
    return RequestError(
        f"There is a response `{response_id}` already. Send another X-Request-Id, or leave it out.",
        param="X-Request-Id",
    )
