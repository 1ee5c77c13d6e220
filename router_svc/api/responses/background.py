"""Responses that run in the background: on the router that has taken them, and on another one when that is lost.

The output is a function of the request, so a router that goes on with a response starts from its beginning, and makes
the same events with the same numbers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from math import inf

from pdserve.base.errors import DeadlineExceeded, Draining, PdserveError, StaleError, StoreError, Unreadable
from pdserve.base.logs import get_logger
from pdserve.base.tasks import ServiceGroup, run_to_completion, service_group
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.responder import Responder
from router_svc.api.responses.background_run import BackgroundRun, BackgroundRunner
from router_svc.api.responses.follower import EventReader
from router_svc.api.responses.formatter import ResponsesFormatter
from router_svc.api.responses.request import Kept
from router_svc.api.responses.stored import StoredResponses
from router_svc.clients.access import Access
from router_svc.records.resumable import Resumable, request_from_bytes, request_to_bytes
from router_svc.request.client import Client
from router_svc.state.claim import Claim, claiming
from router_svc.state.response_record import ResponseRecord, is_response_key

log = get_logger(__name__)

#: Routers that start a response, one after the other: each was lost, perhaps because of it.
MAX_ATTEMPTS = 3
_SWEEP_S = 3.0
#: Time for which a response that this router cannot make is left to others, unless its deadline is earlier.
_LEFT_S = 3600.0


class BackgroundRuns:
    """All background responses of one router. Belongs to the event loop."""

    def __init__(self, responder: Responder, stored: StoredResponses, access: Access) -> None:
        self._responder = responder
        self._stored = stored
        self._state = stored.state
        self._access = access
        self._runner = BackgroundRunner(responder, stored)
        self._runs: dict[str, BackgroundRun] = {}
        #: Keys with a task of this router.
        self._keys: set[str] = set()
        #: Until when the responses that this router cannot make are left to others, in Unix time.
        self._left_until: dict[str, float] = {}
        self._group: ServiceGroup | None = None

    async def run(self) -> None:
        """Runs what was started here, and what lost routers have left, until cancelled."""
        async with service_group() as group:
            self._group = group
            group.start(self._state.run(), name="state")
            while True:
                with contextlib.suppress(StoreError):  # The store logs outages.
                    for key in filter(is_response_key, await self._state.unclaimed()):
                        await self.adopt(key)
                now = time.time()
                self._left_until = {key: until for key, until in self._left_until.items() if until > now}
                await asyncio.sleep(_SWEEP_S)

    async def start(
        self, generation: GenerationRequest, kept: Kept, client: Client, timeout_s: float
    ) -> ResponseRecord:
        """Starts a response, and returns once it is accepted and stored. Raises what refuses it, and `StoreError`."""
        formatter = ResponsesFormatter(generation, self._responder.tokenizer(generation))
        header_id = generation.response_id.partition("_")[2]
        resumable = Resumable(
            shape=generation.shape(header_id),
            generations=generation.generations,
            model_revision=self._responder.models[generation.model].revision,
        )
        record = ResponseRecord(
            tenant=kept.tenant,
            key_id=kept.key_id,
            response=formatter.start("queued"),
            items=kept.items,
            first_own_item=kept.first_own_item,
            timeout_s=timeout_s,
            arrived_at=time.time(),
            request=base64.b64encode(request_to_bytes(resumable)).decode(),
        )
        run = BackgroundRun(record=record, generation=generation, client=client, formatter=formatter)
        self._launch(run.key, self._run_new(run), run.decided.set)
        await run.decided.wait()
        if not run.is_accepted:
            raise run.refusal or Draining("The router is shutting down. Retry: another router will answer.")
        return record

    async def adopt(self, key: str) -> None:
        """Goes on with a response that a lost router has left, unless another router does. Returns once it runs."""
        is_left = self._left_until.get(key, 0.0) > time.time()
        if key in self._keys or is_left or self._group is None or self._group.stopping:
            return
        decided = asyncio.Event()
        self._launch(key, self._adopt(key, decided), decided.set)
        await decided.wait()

    def follow(self, record: ResponseRecord, after: int) -> AsyncIterator[bytes]:
        """Events of a response behind this number, to its last one, wherever it runs. Raises `StoreError`.

        An empty one says that none came for a time.
        """
        return EventReader(record, self._stored, self._runs, self.adopt).events(after)

    async def end_cancelled(self, key: str) -> None:
        """Ends a response as cancelled, unless a router runs it. Raises `StoreError`."""
        async with claiming(self._state, key) as claim:
            if await claim.take():
                record = await self._stored.read(key)
                if record is not None:
                    await self._stored.end(record, claim)

    def _launch(self, key: str, work: Coroutine[None, None, None], on_end: Callable[[], None]) -> None:
        """Starts a task. Raises `Draining`."""
        if self._group is None or self._group.stopping:
            work.close()
            raise Draining("The router is starting or shutting down. Retry: another router will answer.")

        def ended(_: object) -> None:
            self._keys.discard(key)
            on_end()

        self._keys.add(key)
        self._group.start(work, name=f"background {key}").add_done_callback(ended)

    async def _run_new(self, run: BackgroundRun) -> None:
        """A response from its first record to its end. Nothing is left of one that is refused."""
        async with claiming(self._state, run.key) as claim:
            try:
                await self._stored.create(run.record, holder=claim.holder)
            except PdserveError as error:
                run.refusal = error
                return
            try:
                await self._run(run, claim)
            finally:
                if not run.is_accepted:
                    await run_to_completion(self._discard(run.key))

    async def _discard(self, key: str) -> None:
        with contextlib.suppress(StoreError):
            await self._state.delete(key)

    async def _adopt(self, key: str, decided: asyncio.Event) -> None:
        """A response from its claim to its end."""
        async with claiming(self._state, key) as claim:
            until = inf
            try:
                if not await claim.take():
                    return
                record = await self._stored.read(key)
                if record is None or record.is_terminal:
                    return
                until = record.expires_at
                run = await self._taken_over(record, claim)
                if run is not None:
                    decided.set()
                    await self._run(run, claim)
            except Exception as error:  # noqa: BLE001  one response must not end the others
                if isinstance(error, StoreError) and not isinstance(error, Unreadable):
                    return  # The store logs outages.
                # Perhaps another router can. At its deadline, any router ends it.
                self._left_until[key] = min(until, time.time() + _LEFT_S)
                if isinstance(error, PdserveError):
                    log.warning("response_not_adopted", key=key, reason=error)
                else:
                    log.error("response_not_adopted", key=key, exc=error)

    async def _taken_over(self, record: ResponseRecord, claim: Claim) -> BackgroundRun | None:
        """What to run of a claimed response; None: it has ended. Raises `StaleError` for one of another model."""
        record = replace(record, attempts=record.attempts + 1)
        try:
            if time.time() >= record.expires_at:
                raise DeadlineExceeded(f"The response was not complete after {record.timeout_s:g} s: its timeout.")
            if record.attempts > MAX_ATTEMPTS:
                raise PdserveError(f"{record.attempts - 1} routers that ran the response were lost. Send it again.")
            client = self._access.client_of_key(record.key_id)
        except PdserveError as error:
            await self._stored.end(record, claim, error)
            return None
        resumable = request_from_bytes(record.request_bytes(), suffix=secrets.token_hex(4))
        backend = self._responder.models.get(resumable.shape.model)
        if backend is None or resumable.model_revision != backend.revision:
            raise StaleError("it is of another model")
        generation = GenerationRequest.resumed(resumable, backend.model)
        formatter = ResponsesFormatter(generation, backend.model.tokenizer)
        log.info("response_adopted", id=record.id, attempt=record.attempts)
        if not await self._stored.update(record, claim):
            return None
        return BackgroundRun(record=record, generation=generation, client=client, formatter=formatter, is_adopted=True)

    async def _run(self, run: BackgroundRun, claim: Claim) -> None:
        self._runs[run.key] = run
        try:
            await self._runner.run(run, claim)
        except Exception as error:  # noqa: BLE001  one response must not end the others
            log.error("response_broke", exc=error, id=run.record.id)
            run.refusal = PdserveError("The router failed unexpectedly. Its log has the traceback.")
        finally:
            del self._runs[run.key]
            run.feed.close()
