"""One response that runs in the background on this router, from its claim to its last event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace

from pdserve.base.errors import CapacityError, PdserveError, StoreError, TooLarge
from pdserve.base.ids import RequestId
from pdserve.base.logs import get_logger
from pdserve.base.tasks import ServiceGroup, service_group
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.responder import Responder
from router_svc.api.responses.feed import ResponseEvents
from router_svc.api.responses.formatter import ResponsesFormatter
from router_svc.api.responses.stored import StoredResponses
from router_svc.request.client import Client
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage
from router_svc.state.claim import Claim
from router_svc.state.response_record import ResponseRecord, record_key

log = get_logger(__name__)

#: Time for which a router tries to store the end of a response. After it, another router makes the response again.
_END_S = 30.0
_RETRY_S = 0.5


@dataclass(slots=True, kw_only=True)
class BackgroundRun:
    """What a router keeps of a response while it runs in the background."""

    record: ResponseRecord
    generation: GenerationRequest
    client: Client
    formatter: ResponsesFormatter
    #: Whether another router has started it.
    is_adopted: bool = False
    feed: ResponseEvents = field(default_factory=ResponseEvents)
    is_accepted: bool = False
    #: Why the request was refused.
    refusal: PdserveError | None = None
    #: Set when it was accepted, or will not be.
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    #: Whether its end is being stored, after which it has no claim.
    is_ending: bool = False

    @property
    def key(self) -> str:
        """The key of its record."""
        return record_key(self.record.tenant, self.record.id)

    def accept(self) -> None:
        """The request was accepted."""
        self.is_accepted = True
        self.decided.set()


class BackgroundRunner:
    """Runs responses that are claimed. Belongs to the event loop."""

    def __init__(self, responder: Responder, stored: StoredResponses) -> None:
        self._responder = responder
        self._stored = stored

    async def run(self, run: BackgroundRun, claim: Claim) -> None:
        """Runs a response to its end, or until the claim is lost. `run.refusal` says why it was refused, if it was."""
        async with service_group() as group:
            group.start(self._keep(run, claim, group), name="claim")
            writing = group.start(self._write_events(run), name="events")
            last = await self._generate(run, claim)
            if last and await self._end(run, claim, last):
                await writing

    async def _generate(self, run: BackgroundRun, claim: Claim) -> bytes:
        """Makes all events but the last ones, and returns those; empty: the request was refused."""
        requests, record = self._responder.models[run.generation.model].requests, run.record
        spent_s = max(0.0, time.time() - record.arrived_at)
        open_requests = self._responder.open
        entering = open_requests.entered(RequestId(record.id), record.tenant, record.timeout_s, spent_s=spent_s)
        try:
            async with (
                entering as opened,
                requests.run(run.generation.generations, run.client, opened) as stream,
            ):
                run.accept()
                has_started = False

                async def write(deltas: list[ChoiceDelta]) -> None:
                    nonlocal has_started
                    if not has_started:
                        has_started = True
                        stream.first_write()
                        await self._started(run, claim, stream.usage)
                    run.feed.publish(await run.formatter.events(deltas, None))

                await stream.write_to(write)
                return await run.formatter.closing(stream.usage)
        except PdserveError as error:
            if run.is_accepted:
                return run.formatter.failed(error)
            run.refusal = error
            if run.is_adopted:
                await self._postpone(run, claim, error)
            return b""

    async def _started(self, run: BackgroundRun, claim: Claim, usage: TokenUsage) -> None:
        run.feed.publish(await run.formatter.opening(usage))
        with contextlib.suppress(StoreError):
            await self._stored.update(replace(run.record, response=run.formatter.start("in_progress")), claim)

    async def _postpone(self, run: BackgroundRun, claim: Claim, error: PdserveError) -> None:
        """Leaves a response to a later time if only capacity is missing, and ends it otherwise."""
        with contextlib.suppress(StoreError):
            if isinstance(error, CapacityError):
                await self._stored.update(replace(run.record, attempts=run.record.attempts - 1), claim)
            else:
                await self._stored.end(run.record, claim, error)

    async def _end(self, run: BackgroundRun, claim: Claim, last: bytes) -> bool:
        """Stores the response, and then shows its last events. False: it is not stored, and a router makes it again."""
        run.is_ending = True
        try:
            is_stored = await self._store_end(run, claim)
        except TooLarge as error:
            last = run.formatter.failed_at_end(error)
            is_stored = await self._store_end(run, claim)
        if is_stored:
            run.feed.publish(last)
        return is_stored

    async def _store_end(self, run: BackgroundRun, claim: Claim) -> bool:
        """Waits while the store is away, but not for long. False: another router has the response, or it is deleted."""
        response = run.formatter.response
        assert response is not None
        record = replace(run.record, response=response, num_events=run.formatter.num_events)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                while True:
                    try:
                        return await self._stored.update(record, claim)
                    except StoreError as error:
                        log.warning("response_not_stored", id=record.id, reason=error)
                        await asyncio.sleep(_RETRY_S)
        return False

    async def _keep(self, run: BackgroundRun, claim: Claim, group: ServiceGroup) -> None:
        """Ends the run once the response is another router's, or deleted."""
        await claim.keep()
        if not run.is_ending:
            log.info("response_given_up", id=run.record.id)
            group.stop()

    async def _write_events(self, run: BackgroundRun) -> None:
        while True:
            try:
                await run.feed.write_to(self._stored.state, run.key)
                return
            except StoreError:
                await asyncio.sleep(_RETRY_S)
