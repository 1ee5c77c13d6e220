"""The calls a saga makes to workers: their errors are mapped, and leaving the block ends the call for certain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from pdserve.base.errors import PeerLost, TransferTimeout
from pdserve.base.rpc import mapped_rpc_errors, open_channel
from pdserve.base.workers import WorkerRecord
from pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from router_svc.placement import Incarnation

Event = TypeVar("Event")


def is_reported(error: BaseException) -> bool:
    """Whether the worker itself answered with this error, so that it is alive."""
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError):
        return False
    return any(str(key).startswith("pdserve-") for key, _ in cause.trailing_metadata() or ())


def is_gone(error: BaseException) -> bool:
    """Whether the worker itself could not be reached; a loss that it reports is somebody else's."""
    return isinstance(error, PeerLost) and isinstance(error.__cause__, grpc.aio.AioRpcError) and not is_reported(error)


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    users: int = 0


class Channels:
    """One channel for each incarnation of a worker, kept open between requests."""

    def __init__(self) -> None:
        self._entries: dict[Incarnation, _Entry] = {}

    @asynccontextmanager
    async def use(self, worker: WorkerRecord) -> AsyncIterator[grpc.aio.Channel]:
        """The worker's channel; it stays open at least until the block ends."""
        key = (worker.worker_id, worker.epoch)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(open_channel(worker.grpc_address))
        entry.users += 1
        try:
            yield entry.channel
        finally:
            entry.users -= 1

    async def sweep(self, current: Collection[Incarnation]) -> None:
        """Closes channels of incarnations that are gone and that nobody uses."""
        for key in [key for key, entry in self._entries.items() if key not in current and not entry.users]:
            await self._entries.pop(key).channel.close()

    async def close(self) -> None:
        """Closes all."""
        while self._entries:
            await self._entries.popitem()[1].channel.close()


class DecodeCall:
    """A request on one decode worker: commands go out, events come in, until one side closes."""

    def __init__(
        self, call: grpc.aio.StreamStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse], peer: str
    ) -> None:
        self._call = call
        self._events = aiter(call)
        self._peer = peer

    async def send(self, request: decode_pb2.DecodeRequest) -> None:
        """Raises the error that ended the call, if one did."""
        with mapped_rpc_errors(self._peer):
            try:
                await self._call.write(request)
            except asyncio.InvalidStateError:
                raise PeerLost(f"Lost {self._peer}: {await self._call.details() or 'it ended the call'}.") from None

    async def next_event(self, silence_s: float | None) -> decode_pb2.DecodeResponse | None:
        """The next event; None when the worker closed the stream. Raises `TransferTimeout` after `silence_s`."""
        return await _next(self._events, silence_s, self._peer)


class PrefillCall:
    """A prompt on one prefill worker."""

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse], peer: str
    ) -> None:
        self._events = aiter(call)
        self._peer = peer

    async def next_event(self, silence_s: float | None) -> prefill_pb2.PrefillResponse | None:
        """As `DecodeCall.next_event`."""
        return await _next(self._events, silence_s, self._peer)


async def _next(events: AsyncIterator[Event], silence_s: float | None, peer: str) -> Event | None:
    with mapped_rpc_errors(peer):
        try:
            async with asyncio.timeout(silence_s):
                return await anext(events)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise TransferTimeout(f"{peer} has been silent for {silence_s:g} s.") from None


@asynccontextmanager
async def decode_call(channels: Channels, worker: WorkerRecord) -> AsyncIterator[DecodeCall]:
    """Opens the call; leaving the block frees everything on the worker."""
    async with channels.use(worker) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode()
        try:
            yield DecodeCall(call, f"decode worker {worker.worker_id}")
        finally:
            call.cancel()


@asynccontextmanager
async def prefill_call(
    channels: Channels, worker: WorkerRecord, request: prefill_pb2.PrefillRequest
) -> AsyncIterator[PrefillCall]:
    """Opens the call; leaving the block stops the compute and frees the blocks."""
    async with channels.use(worker) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request)
        try:
            yield PrefillCall(call, f"prefill worker {worker.worker_id}")
        finally:
            call.cancel()
