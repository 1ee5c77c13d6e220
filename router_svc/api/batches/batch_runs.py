"""Batches that run: on the router that has claimed one, and on another one when that is lost.

A router that goes on with a batch runs the requests that have no result yet. Those that ran when a router was lost run
again, with the same tokens if they have a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

from pdserve.base.batch_lines import BatchLine
from pdserve.base.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    Draining,
    Overloaded,
    PdserveError,
    StaleError,
    StoreError,
    Unreadable,
)
from pdserve.base.ids import RequestId
from pdserve.base.logs import get_logger
from pdserve.base.tasks import ServiceGroup, service_group
from router_svc.api.batches.input_lines import InputInvalid, InputLines
from router_svc.api.batches.line_run import LineRunner
from router_svc.api.batches.results import Result, Results
from router_svc.api.batches.stored_batches import StoredBatches
from router_svc.api.responder import Responder
from router_svc.clients.access import Access
from router_svc.request.client import Client
from router_svc.state.batch_record import BatchRecord, LineError, is_batch_key
from router_svc.state.claim import Claim, claiming
from router_svc.state.state_store import EventBatch

log = get_logger(__name__)

#: Routers that run a batch one after the other without any result: each was lost, perhaps because of it.
MAX_ATTEMPTS = 3
#: Batches of this router at a time. Others wait, or run on other routers.
MAX_RUNNING = 8
_SWEEP_S = 3.0
_RETRY_S = 1.0
#: The event that says that a batch has ended.
_END = EventBatch(first=0, events=[b"end"])


class BatchRuns:
    """All batches of one router. Belongs to the event loop."""

    def __init__(
        self, batches: StoredBatches, responder: Responder, access: Access, *, rows: int, max_line_bytes: int
    ) -> None:
        """`rows`: requests of all batches that run here at a time."""
        self._batches = batches
        self._state = batches.state
        self._responder = responder
        self._access = access
        self._max_line_bytes = max_line_bytes
        self._lines = LineRunner(responder)
        self._rows = asyncio.Semaphore(rows)
        #: Keys of records that this router cannot read.
        self._unreadable: set[str] = set()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._group: ServiceGroup | None = None
        self._is_draining = False

    async def run(self) -> None:
        """Runs what was started here, and what other routers have left, until cancelled."""
        async with service_group() as group:
            self._group = group
            while True:
                with contextlib.suppress(StoreError):  # The store logs outages.
                    keys = [key for key in await self._state.unclaimed() if is_batch_key(key)]
                    # The earliest first: ids ascend with time.
                    for key in sorted(keys, key=lambda key: key.rpartition(":")[2]):
                        self._adopt(key)
                await asyncio.sleep(_SWEEP_S)

    def drain(self) -> None:
        """Ends all runs, so that other routers go on with them at once."""
        self._is_draining = True
        for task in self._running.values():
            task.cancel()

    async def start(self, record: BatchRecord) -> None:
        """Stores a new batch and runs it, here or elsewhere. Raises `RequestError`, `StoreError` and `Draining`."""
        if self._group is None or self._group.stopping or self._is_draining:
            raise Draining("The router is starting or shutting down. Retry: another router will answer.")
        async with claiming(self._state, record.key) as claim:
            await self._batches.create(record, holder=claim.holder)
        self._adopt(record.key)

    def _adopt(self, key: str) -> None:
        """Runs a batch that no router runs, if there is room."""
        assert self._group is not None
        is_known = key in self._running or key in self._unreadable
        if is_known or self._is_draining or self._group.stopping or len(self._running) >= MAX_RUNNING:
            return
        task = self._group.start(self._run(key), name=f"batch {key}")
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    async def end_cancelled(self, record: BatchRecord) -> bool:
        """Ends a batch that no router runs. False: one has it. Raises `StoreError` and `StaleError`."""
        async with claiming(self._state, record.key) as claim:
            if not await claim.take():
                return False
            found = await self._batches.read(record.key)
            if found is not None:
                await self._finish(Results(self._batches, found, claim.holder), "cancelled")
            return True

    async def wait_ended(self, key: str, *, wait_s: float) -> None:
        """Returns when a batch has ended, or after this time. Raises `StoreError`."""
        await self._state.events(key, -1, wait_s=wait_s)

    async def _run(self, key: str) -> None:
        """A batch from its claim to its end."""
        async with claiming(self._state, key) as claim:
            try:
                record = await self._batches.read(key) if await claim.take() else None
            except Unreadable as error:
                # Perhaps another router can read it.
                self._unreadable.add(key)
                log.warning("batch_not_adopted", key=key, reason=error)
            except StoreError:  # The store logs outages.
                return
            else:
                if record is not None:
                    await self._run_claimed(Results(self._batches, record, claim.holder), claim)

    async def _run_claimed(self, results: Results, claim: Claim) -> None:
        try:
            async with service_group() as group:
                group.start(self._keep(results, claim, group), name="claim")
                await self._process(results)
        except StaleError as error:
            log.info("batch_given_up", reason=error)
        except asyncio.CancelledError:
            await self._hand_back(results)
            raise
        except StoreError as error:
            # A router goes on once the store is back.
            log.warning("batch_interrupted", id=results.record.id, reason=error)
            await self._hand_back(results)
        except Exception as error:  # noqa: BLE001  one batch must not end the others
            log.error("batch_broke", exc=error, id=results.record.id)

    async def _process(self, results: Results) -> None:
        """Runs a batch to its end. Raises `StaleError` and `StoreError`."""
        record = results.record
        await results.change(attempts=record.attempts + 1)
        left_s = record.expires_at - time.time()
        try:
            if record.attempts >= MAX_ATTEMPTS:
                raise PdserveError(f"{record.attempts} routers that ran the batch were lost. Send it again.")
            client = self._access.client_of_key(record.key_id)
            open_requests = self._responder.open
            async with open_requests.entered(RequestId(record.id), record.tenant, left_s):
                await self._run_lines(results, client)
        except DeadlineExceeded:
            await self._finish(results, "expired")
        except Cancelled:
            await self._finish(results, "cancelled")
        except (StaleError, StoreError):
            raise
        except InputInvalid as error:
            await self._finish(results, "failed", errors=error.errors)
        except PdserveError as error:
            await self._finish(results, "failed", errors=[LineError(code="batch_failed", message=str(error))])
        else:
            await self._finish(results, "completed")

    async def _run_lines(self, results: Results, client: Client) -> None:
        files, threads = self._batches.files, self._responder.intake.threads
        lines = InputLines(files, threads, results.record, max_bytes=self._max_line_bytes)
        if results.record.status == "validating":
            total, now = await lines.check(), int(time.time())
            await results.change(status="in_progress", times={"in_progress": now}, total=total)
        done = await results.done()
        tasks: set[asyncio.Task[None]] = set()
        try:
            async with service_group() as group:
                async for line in lines.read():
                    if line.custom_id not in done:
                        task = await self._started(group, self._run_line(line, client, results))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                if tasks:
                    await asyncio.wait(tasks)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _started(self, group: ServiceGroup, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that has one of the rows until it ends."""
        try:
            await self._rows.acquire()
        except BaseException:
            work.close()
            raise
        try:
            task = group.start(work, name="batch line")
        except BaseException:
            self._rows.release()
            raise
        # The task does not release the row itself: a task that is cancelled before its first turn runs nothing.
        task.add_done_callback(lambda _: self._rows.release())
        return task

    async def _run_line(self, line: BatchLine, client: Client, results: Results) -> None:
        await results.add(await self._result(line, client, results.record.expires_at))

    async def _finish(self, results: Results, status: str, *, errors: list[LineError] | None = None) -> None:
        """Makes files of the results, and ends the batch. Waits while the store is away. Raises `StaleError`."""
        record, files = results.record, self._batches.files
        contents = ((record.output_file_id, record.output), (record.error_file_id, record.error))
        for file_id, content in contents:
            while content.num_bytes:
                try:
                    name = f"{record.id}_{'output' if content is record.output else 'error'}.jsonl"
                    await files.create_of(content, record.tenant, file_id, filename=name, purpose="batch_output")
                    break
                except StoreError:
                    await asyncio.sleep(_RETRY_S)
        before = "cancelling" if status == "cancelled" else "finalizing"
        now = int(time.time())
        await results.change(status=status, times=record.times | {before: now, status: now}, errors=errors or [])
        log.info("batch_ended", id=record.id, status=status, completed=record.completed, failed=record.failed)
        with contextlib.suppress(StoreError):
            await self._state.append(record.key, _END)

    async def _result(self, line: BatchLine, client: Client, expires_at: float) -> Result:
        """The result of a request, once there is capacity for it. It may take the time that its batch has."""
        while True:
            try:
                return await self._lines.run(line, client, max(expires_at - time.time(), 0.0))
            except CapacityError as error:
                await asyncio.sleep(error.retry_after_s if isinstance(error, Overloaded) else _RETRY_S)

    async def _keep(self, results: Results, claim: Claim, group: ServiceGroup) -> None:
        """Ends the run once the batch is another router's, or deleted."""
        await claim.keep()
        if not results.record.is_terminal:
            log.info("batch_given_up", key=claim.key)
            group.stop()

    async def _hand_back(self, results: Results) -> None:
        """This router was not lost: another one may try as often as before."""
        record = results.record
        with contextlib.suppress(StoreError, StaleError):
            if not record.is_terminal:
                await results.change(attempts=max(0, record.attempts - 1))
