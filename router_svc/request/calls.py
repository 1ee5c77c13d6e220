"""The calls of a request to workers. Errors are mapped, and leaving a call's block ends it on the worker."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from pdserve.base.errors import PdserveError, PeerLost, TransferTimeout
from pdserve.base.trace_context import TraceContext
from pdserve.base.wire import error_from_wire
from pdserve.net.rpc import mapped_rpc_errors, trace_metadata
from pdserve.net.streams import MessageStream
from pdserve.peers.seals import Purpose
from pdserve.peers.workers import WorkerRecord
from pdserve.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc
from router_svc.request.reports import check_decode_event, check_prefill_event
from router_svc.routing.cluster import Cluster
from router_svc.routing.silence import SilenceLimits, means_hang
from router_svc.routing.stream_pool import StreamPool


class _Reported(Exception):
    """Cause of an error that a worker reported over a stream."""


class _WentSilent(Exception):
    """Cause of the timeout of a worker that sent no keep-alive."""


def is_reported(error: BaseException) -> bool:
    """Whether the worker itself has answered with this error, and is therefore alive."""
    cause = error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        return any(str(key).startswith("pdserve-") for key, _ in cause.trailing_metadata() or ())
    return isinstance(cause, _Reported)


#: Connection errors that say something about the peer. Others, such as too many open files, are the router's own.
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}


def is_gone(error: BaseException) -> bool:
    """Whether the worker itself could not be reached, or sends nothing although it should.

    If a worker reports a loss, it is another worker that was lost.
    """
    cause = error.__cause__
    if isinstance(error, TransferTimeout) and isinstance(cause, _WentSilent):
        return True
    is_from_peer = isinstance(cause, (grpc.aio.AioRpcError, ConnectionError, TimeoutError)) or (
        isinstance(cause, OSError) and cause.errno in _UNREACHABLE
    )
    return isinstance(error, PeerLost) and is_from_peer and not is_reported(error)


def is_lost_in_call(error: BaseException) -> bool:
    """Whether the worker was lost after it had been reached, so that it may have had the request."""
    cause = error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        return is_gone(error) and "failed to connect" not in (cause.details() or "")
    return is_gone(error) and isinstance(cause, ConnectionError) and not isinstance(cause, ConnectionRefusedError)


class DecodeFailed(Exception):
    """The attempt on a decode worker has failed with `error`. Never leaves the saga.

    `worker` is the one at fault: the decode worker, or a prefill worker that the decode worker waited for.
    """

    def __init__(self, error: PdserveError, worker: WorkerRecord) -> None:
        super().__init__(str(error))
        self.error = error
        self.worker = worker


class DecodeCall:
    """A request on one decode worker: commands go out and events come in until one side closes.

    One task reads the events. Another one may wait for the milestones among them, which are tickets and the start.
    """

    def __init__(
        self,
        stream: MessageStream[decode_pb2.DecodeResponse],
        worker: WorkerRecord,
        on_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_wanted` is called when the worker wants the request to move, or asks where to copy its blocks."""
        self._stream = stream
        self._peer = _name_of(worker)
        self.worker = worker
        # Unbounded, but a worker sends no more milestones than there are attempts.
        self._milestones: asyncio.Queue[decode_pb2.DecodeResponse] = asyncio.Queue()
        #: Whether the sequences run, so that failures of prefill workers no longer matter.
        self.has_started = False
        #: Whether the worker has sent all it has to send.
        self.has_ended = False
        #: Why the worker wants the request to move; empty: it does not.
        self.leave_reason = ""
        #: Set while the worker asks where to copy the request's blocks: epoch of one that could not take them, or 0.
        self.replica_wanted: int | None = None
        self._on_wanted = on_wanted
        #: Called when the worker has sent blocks to where the request moves.
        self.on_handed_off: Callable[[decode_pb2.HandedOff], None] = lambda result: None

    @property
    def must_leave(self) -> bool:
        """Whether the worker ends soon."""
        return self.leave_reason == "drain"

    def close(self) -> None:
        """Ends the call: the worker frees what it holds. `next_event` raises then."""
        self._stream.close()

    async def send(self, command: decode_pb2.DecodeRequest) -> None:
        """Sends a command, unless the worker needs none any more. If the call has broken, `next_event` raises why."""
        if not self.has_ended:
            await self._stream.write(command)

    async def next_event(self, limits: SilenceLimits) -> decode_pb2.DecodeResponse:
        """The next event from the worker, which may be silent for as long as `limits` allow.

        Raises:
            DecodeFailed: with the error that the worker reported, `PeerLost` or `TransferTimeout`.
        """
        try:
            event = await self._read(limits.of_decode(self.worker, has_started=self.has_started))
            kind = event.WhichOneof("event")
            check_decode_event(event, kind, self._peer)
        except PdserveError as error:
            raise DecodeFailed(error, self.worker) from error
        if not self.has_started and kind in ("ticket", "started"):
            self.has_started = kind == "started"
            self._milestones.put_nowait(event)
        self.has_ended = event.HasField("ended")
        if kind == "leave":
            self.leave_reason = "" if event.leave.is_withdrawn else event.leave.reason
            self._on_wanted()
        elif kind == "replica_wanted":
            self.replica_wanted = event.replica_wanted.failed_epoch
            self._on_wanted()
        elif kind == "handed_off":
            self.on_handed_off(event.handed_off)
        return event

    async def milestone(self, timeout_s: float | None, error: PdserveError) -> decode_pb2.DecodeResponse:
        """The next ticket or start. Raises `DecodeFailed` with `error` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._milestones.get()
        except TimeoutError:
            raise DecodeFailed(error, self.worker) from error

    async def _read(self, silence_s: float | None) -> decode_pb2.DecodeResponse:
        try:
            event = await self._stream.read(silence_s)
        except TimeoutError:
            assert silence_s is not None
            raise _silent(self.worker, silence_s) from _cause_of_silence(self.worker, silence_s)
        if event is None:
            # The kernel closes a dead worker's connection. A worker that has finished leaves closing to the router.
            raise PeerLost(f"Lost {self._peer}: it closed the connection.") from ConnectionResetError()
        if event.HasField("failed"):
            raise error_from_wire(event.failed) from _Reported()
        return event


@asynccontextmanager
async def decode_call(
    worker: WorkerRecord, streams: StreamPool[decode_pb2.DecodeResponse], on_wanted: Callable[[], None] = lambda: None
) -> AsyncIterator[DecodeCall]:
    """Connects to the worker; leaving the block frees the blocks there. `on_wanted`: see `DecodeCall`.

    Raises `DecodeFailed` if it is unreachable.
    """
    try:
        stream = await _connect(worker, streams)
    except PeerLost as error:
        raise DecodeFailed(error, worker) from error
    try:
        yield DecodeCall(stream, worker, on_wanted)
    finally:
        stream.close()


async def _connect(
    worker: WorkerRecord, streams: StreamPool[decode_pb2.DecodeResponse]
) -> MessageStream[decode_pb2.DecodeResponse]:
    try:
        return await streams.open(worker.stream_address)
    except OSError as error:
        raise PeerLost(f"Lost {_name_of(worker)}: {error.strerror or 'it does not answer'}.") from error


class PrefillCall:
    """A prompt on one prefill worker."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
        worker: WorkerRecord,
    ) -> None:
        self._events = aiter(call)
        self._worker = worker

    async def next_event(self, silence_s: float) -> prefill_pb2.PrefillResponse | None:
        """The next event, or None once the worker has closed the stream.

        Raises:
            PdserveError: the error that the worker reported, `PeerLost`, or `TransferTimeout` after `silence_s`.
        """
        with mapped_rpc_errors(_name_of(self._worker)):
            try:
                async with asyncio.timeout(silence_s):
                    event = await anext(self._events)
                check_prefill_event(event, _name_of(self._worker))
                return event
            except StopAsyncIteration:
                return None
            except TimeoutError:
                raise _silent(self._worker, silence_s) from _cause_of_silence(self._worker, silence_s)


@asynccontextmanager
async def prefill_call(
    cluster: Cluster, worker: WorkerRecord, request: prefill_pb2.PrefillRequest, trace: TraceContext | None
) -> AsyncIterator[PrefillCall]:
    """Opens the call, within the span `trace`; leaving the block stops the computation and frees the blocks."""
    async with cluster.channels.use(worker.worker_id, worker.epoch, worker.grpc_address) as channel:
        sealed = cluster.sealed(Purpose.PROMPT, worker, request)
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(sealed, metadata=trace_metadata(trace))
        del request, sealed  # Prompts are large, and the call may stay open for as long as the request runs.
        try:
            yield PrefillCall(call, worker)
        finally:
            call.cancel()


def _silent(worker: WorkerRecord, silence_s: float) -> TransferTimeout:
    return TransferTimeout(f"The {_name_of(worker)} has been silent for {silence_s:g} s.")


def _cause_of_silence(worker: WorkerRecord, silence_s: float) -> _WentSilent | None:
    return _WentSilent() if means_hang(worker, silence_s) else None


def _name_of(worker: WorkerRecord) -> str:
    return f"{worker.tier} worker {worker.worker_id}"
