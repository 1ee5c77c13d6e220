"""The calls a saga makes to workers: their errors are mapped, and leaving the block ends the call for certain."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from pdserve.base.errors import PeerLost, TransferTimeout
from pdserve.base.rpc import ChannelPool, mapped_rpc_errors
from pdserve.base.streams import MessageStream, open_stream
from pdserve.base.wire import error_from_wire
from pdserve.base.workers import WorkerRecord
from pdserve.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc


class _Reported(Exception):
    """Cause of an error that a worker told over a stream."""


def is_reported(error: BaseException) -> bool:
    """Whether the worker itself answered with this error, so that it is alive."""
    cause = error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        return any(str(key).startswith("pdserve-") for key, _ in cause.trailing_metadata() or ())
    return isinstance(cause, _Reported)


#: Errors of a connection that say something of the peer; others, like too many open files, are our own.
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}


def is_gone(error: BaseException) -> bool:
    """Whether the worker itself could not be reached; a loss that it reports is somebody else's."""
    cause = error.__cause__
    is_its = isinstance(cause, (grpc.aio.AioRpcError, ConnectionError, TimeoutError)) or (
        isinstance(cause, OSError) and cause.errno in _UNREACHABLE
    )
    return isinstance(error, PeerLost) and is_its and not is_reported(error)


class DecodeCall:
    """A request on one decode worker: commands go out, events come in, until one side closes."""

    def __init__(self, stream: MessageStream[decode_pb2.DecodeResponse], peer: str) -> None:
        self._stream = stream
        self._peer = peer

    async def send(self, request: decode_pb2.DecodeRequest) -> None:
        """Tells the worker something. What ended the call, if that has happened, is raised by `next_event`."""
        await self._stream.write(request)

    async def next_event(self, silence_s: float | None) -> decode_pb2.DecodeResponse:
        """The next event. Raises the error the worker ended with, `PeerLost`, `TransferTimeout` after `silence_s`."""
        try:
            event = await self._stream.read(silence_s)
        except TimeoutError:
            raise TransferTimeout(f"{self._peer} has been silent for {silence_s:g} s.") from None
        if event is None:
            # A worker that dies closes it too, by its kernel; one that has said everything leaves that to us.
            raise PeerLost(f"Lost {self._peer}: it closed the connection.") from ConnectionResetError()
        if event.HasField("failed"):
            raise error_from_wire(event.failed) from _Reported()
        return event

    def close(self) -> None:
        """Frees everything on the worker."""
        self._stream.close()


class PrefillCall:
    """A prompt on one prefill worker."""

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse], peer: str
    ) -> None:
        self._events = aiter(call)
        self._peer = peer

    async def next_event(self, silence_s: float | None) -> prefill_pb2.PrefillResponse | None:
        """The next event; None when the worker closed the stream. Raises `TransferTimeout` after `silence_s`."""
        with mapped_rpc_errors(self._peer):
            try:
                async with asyncio.timeout(silence_s):
                    return await anext(self._events)
            except StopAsyncIteration:
                return None
            except TimeoutError:
                raise TransferTimeout(f"{self._peer} has been silent for {silence_s:g} s.") from None


async def open_decode_call(worker: WorkerRecord) -> DecodeCall:
    """A call to be closed. Raises `PeerLost`."""
    peer = f"decode worker {worker.worker_id}"
    try:
        stream = await open_stream(worker.stream_address, decode_pb2.DecodeResponse.FromString)
    except OSError as error:
        raise PeerLost(f"Lost {peer}: {error.strerror or 'it does not answer'}.") from error
    return DecodeCall(stream, peer)


@asynccontextmanager
async def prefill_call(
    channels: ChannelPool, worker: WorkerRecord, request: prefill_pb2.PrefillRequest
) -> AsyncIterator[PrefillCall]:
    """Opens the call; leaving the block stops the compute and frees the blocks."""
    async with channels.use(worker.worker_id, worker.epoch, worker.grpc_address) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request)
        try:
            yield PrefillCall(call, f"prefill worker {worker.worker_id}")
        finally:
            call.cancel()
