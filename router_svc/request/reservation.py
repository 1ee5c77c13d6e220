"""A request's place on a decode worker, as its saga holds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.base.errors import PdserveError
from pdserve.base.workers import WorkerRecord
from pdserve.v1 import decode_pb2
from router_svc.request.calls import DecodeCall, open_decode_call


class DecodeFailed(Exception):
    """What went wrong has to do with the decode worker, whoever met it. Never leaves the saga."""

    def __init__(self, error: PdserveError) -> None:
        super().__init__(str(error))
        self.error = error


class Reservation:
    """The call, its milestones, and whether decoding has begun. Every failure of the call is a `DecodeFailed`."""

    def __init__(self, call: DecodeCall, worker: WorkerRecord) -> None:
        self._call = call
        self.worker = worker
        # Unbounded, but a worker sends no more of them than there are attempts.
        self._milestones: asyncio.Queue[decode_pb2.DecodeResponse] = asyncio.Queue()
        #: The sequences run: whatever happens to prefill workers no longer matters.
        self.has_started = False

    async def send(self, request: decode_pb2.DecodeRequest) -> None:
        """Tells the worker something."""
        await self._call.send(request)

    async def next_event(self, silence_s: float) -> decode_pb2.DecodeResponse:
        """What the worker says next.

        Before decoding has begun its silence is not limited here: others wait for it.
        """
        try:
            return await self._call.next_event(silence_s if self.has_started else None)
        except PdserveError as error:
            raise DecodeFailed(error) from error

    def reach(self, milestone: decode_pb2.DecodeResponse) -> None:
        """A ticket or the start has come."""
        self.has_started |= milestone.HasField("started")
        self._milestones.put_nowait(milestone)

    async def milestone(self, timeout_s: float, error: PdserveError) -> decode_pb2.DecodeResponse:
        """The next ticket or start. Fails with `error` when that takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._milestones.get()
        except TimeoutError:
            raise DecodeFailed(error) from error


@asynccontextmanager
async def reserving(worker: WorkerRecord) -> AsyncIterator[Reservation]:
    """A call to the worker; leaving the block ends it. Raises `DecodeFailed` when it cannot be reached."""
    try:
        call = await open_decode_call(worker)
    except PdserveError as error:
        raise DecodeFailed(error) from error
    try:
        yield Reservation(call, worker)
    finally:
        call.close()
