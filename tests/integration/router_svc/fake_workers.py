"""Workers that speak the real protocol and compute nothing: their replies and their faults come from a script."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from pdserve.base.admin import bound_socket
from pdserve.base.errors import PdserveError
from pdserve.base.ids import Epoch, WorkerId, new_epoch
from pdserve.base.registry import Registrar
from pdserve.base.rpc import method, serve_grpc
from pdserve.base.sampling import ChoiceTokens, FinishReason, TokenLogprobs
from pdserve.base.store import Store
from pdserve.base.streams import MessageStream, PeerLeft, serve_streams
from pdserve.base.tasks import service_group
from pdserve.base.wire import error_to_wire, tokens_to_wire
from pdserve.base.workers import Tier, WorkerLoad, WorkerRecord
from pdserve.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc
from tests.support.records import LAYOUT
from tests.support.tiny_model import END, MAX_POSITIONS, NAME, tokens_of

Context = grpc.aio.ServicerContext[Any, Any] | MessageStream[decode_pb2.DecodeRequest]
#: A fault: runs at its point in a call, and raises, waits or does what it wants.
Fault = Callable[[Context], Awaitable[None]]


class _Vanished(Exception):
    """Ends a call as a broken connection does."""


async def vanish(_: Context) -> None:
    """The worker dies: what its peer sees is a broken connection."""
    raise _Vanished


class _Left(Exception):
    """Ends a call as if all had been said."""


async def leave(_: Context) -> None:
    """The worker closes the stream without an error."""
    raise _Left


async def hang(_: Context) -> None:
    """The worker is there and says nothing."""
    # Not an event: nobody would hold it, and what waits for garbage is garbage too.
    await asyncio.sleep(3600)


def failing(error: PdserveError) -> Fault:
    """The worker answers with an error."""

    async def fail(_: Context) -> None:
        raise error

    return fail


@dataclass
class Script:
    """What the model says, and what goes wrong. Faults are taken one per call, in order; None is a call without one."""

    #: Of each choice, by index; the last one serves further choices.
    replies: list[list[int]] = field(default_factory=lambda: [[*tokens_of("Hello world."), END]])
    #: Tokens of one message.
    piece: int = 1
    cached_tokens: int = 0
    logprobs: bool = False
    faults: dict[str, deque[Fault | None]] = field(default_factory=lambda: defaultdict(deque))
    #: When set, decode workers send tokens after the first only as it is released, once for each message.
    pace: asyncio.Semaphore | None = None

    def fail(self, point: str, *faults: Fault | None) -> None:
        """Points: prefill, prefill_queued, prefill_started, prefill_token, prefill_commit, prefill_committed; decode,
        decode_ticket, decode_local, decode_started, decode_token.
        """
        self.faults[point].extend(faults)

    async def reach(self, point: str, context: Context) -> None:
        """A call comes to a point."""
        fault = self.faults[point].popleft() if self.faults[point] else None
        if fault is not None:
            await fault(context)

    def pieces(self, choice: int, start: int, sampling: Any) -> list[ChoiceTokens]:
        """The reply of a choice from token `start` on, as messages."""
        reply = self.replies[min(choice, len(self.replies) - 1)][: sampling.max_tokens]
        ends = FinishReason.STOP if reply[-1] == END and not sampling.ignore_eos else FinishReason.LENGTH
        pieces = []
        for first in range(start, len(reply), self.piece):
            token_ids = tuple(reply[first : first + self.piece])
            last = first + len(token_ids) == len(reply)
            pieces.append(
                ChoiceTokens(
                    choice_index=choice,
                    first_index=first,
                    token_ids=token_ids,
                    logprobs=tuple(map(_logprobs, token_ids)) if sampling.HasField("logprobs") else (),
                    finish_reason=ends if last else None,
                    stop_token_id=END if last and ends is FinishReason.STOP else None,
                )
            )
        return pieces


def _logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-0.5, rank=1, top_ids=(token_id, 255), top_logprobs=(-0.5, float("-inf")))


class World:
    """The cluster's wires: what prefill workers commit reaches the decode worker that gave the ticket."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.commits: dict[bytes, asyncio.Event] = {}
        #: Tokens of which a decode worker can have the blocks sent; more it computes itself.
        self.most_receivable = 1_000_000
        #: Everything routers asked, in order.
        self.decode_starts: list[decode_pb2.DecodeStart] = []
        self.commands: list[str] = []
        self.prefills: list[prefill_pb2.PrefillRequest] = []
        #: Calls that are being served: must be none after every test.
        self.open_calls = 0
        #: Requests of which a decode worker has told every token.
        self.decodes_done = 0
        self._changed = asyncio.Event()

    def note_open(self, change: int) -> None:
        """A call begins or ends."""
        self.open_calls += change
        self._note()

    def note_done(self) -> None:
        """A decode worker has told every token."""
        self.decodes_done += 1
        self._note()

    def note_start(self, start: decode_pb2.DecodeStart) -> None:
        """A decode worker was given a request."""
        self.decode_starts.append(start)
        self._note()

    def note_prefill(self, request: prefill_pb2.PrefillRequest) -> None:
        """A prefill worker was given a request."""
        self.prefills.append(request)
        self._note()

    def note_command(self, kind: str) -> None:
        """A decode worker was told something."""
        self.commands.append(kind)
        self._note()

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once the condition holds, looking again whenever anything happens."""
        async with asyncio.timeout(10):
            while not condition():
                await self._changed.wait()


class FakeDecode:
    """A decode worker. The prompt's first `cached` tokens are in its cache."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cached = 0

    async def serve(self, stream: MessageStream[decode_pb2.DecodeRequest]) -> None:
        """One connection."""
        self._world.note_open(1)
        try:
            first = await stream.read()
            assert first is not None
            self._world.note_start(first.start)
            await _DecodeSession(self, self._world, first.start, stream).run()
        except (_Left, _Vanished):
            pass
        finally:
            self._world.note_open(-1)


class _DecodeSession:
    def __init__(
        self,
        worker: FakeDecode,
        world: World,
        start: decode_pb2.DecodeStart,
        stream: MessageStream[decode_pb2.DecodeRequest],
    ) -> None:
        self._worker = worker
        self._world = world
        self._start = start
        self._stream = stream
        self._attempt = start.ref.attempt
        self._stopped: set[int] = set()
        self._ready = asyncio.Event()
        self._local: decode_pb2.PrefillLocally | None = None

    async def run(self) -> None:
        script = self._world.script
        uncached = len(self._start.prompt_token_ids) - self._worker.cached
        async with service_group() as tasks:
            obeying = tasks.start(self._obey(tasks), name="obey")
            # It begins before a fault can end it.
            await asyncio.sleep(0)
            await script.reach("decode", self._stream)
            if uncached <= self._start.local_prefill_threshold or uncached > self._world.most_receivable:
                self._local = decode_pb2.PrefillLocally()
            else:
                tasks.start(self._grant(), name="grant")
            if self._local is None:
                await self._ready.wait()
            await script.reach("decode_started", self._stream)
            started = decode_pb2.DecodeStarted(
                prefilled_locally=self._local is not None, cached_tokens=self._worker.cached, queue_s=0.25
            )
            await self._stream.write(decode_pb2.DecodeResponse(started=started))
            await self._send_tokens()
            self._world.note_done()
            # As the real one: the router ends the stream.
            await asyncio.wait((obeying,), timeout=2)

    async def _send_tokens(self) -> None:
        script, sampling = self._world.script, self._start.sampling
        first = 0 if self._local is not None else 1
        queues = [deque(script.pieces(choice, first, sampling)) for choice in range(sampling.n)]
        while any(queues):
            if script.pace is not None:
                await script.pace.acquire()
            await script.reach("decode_token", self._stream)
            pieces = [queue.popleft() for index, queue in enumerate(queues) if queue and index not in self._stopped]
            if not pieces:
                return
            tokens = decode_pb2.DecodeTokens(choices=[tokens_to_wire(piece) for piece in pieces])
            await self._stream.write(decode_pb2.DecodeResponse(tokens=tokens))

    async def _grant(self) -> None:
        await self._world.script.reach("decode_ticket", self._stream)
        transfer_id = f"{self._start.ref.request_id}/{self._attempt}".encode()
        self._world.commits[transfer_id] = self._ready
        ticket = decode_pb2.Ticket(transfer_id=transfer_id, attempt=self._attempt, lease_s=LEASE_S)
        granted = decode_pb2.TicketGranted(ticket=ticket, reserve_s=0.125)
        await self._stream.write(decode_pb2.DecodeResponse(ticket=granted))

    async def _obey(self, tasks: Any) -> None:
        while (request := await self._stream.read()) is not None:
            kind = str(request.WhichOneof("command"))
            if kind == "renew_ticket" and not self._ready.is_set():
                self._attempt = request.renew_ticket.attempt
                tasks.start(self._grant(), name="grant")
            elif kind == "prefill_locally":
                await self._world.script.reach("decode_local", self._stream)
                self._local = request.prefill_locally
                self._ready.set()
            elif kind == "stop_choice":
                self._stopped.add(request.stop_choice.choice_index)
            self._world.note_command(kind)
        raise PeerLeft


def _failure(error: PdserveError) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(failed=error_to_wire(error))


#: Of fake tickets: short, so that silence is noticed within a test.
LEASE_S = 0.3


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill worker."""

    def __init__(self, world: World) -> None:
        self._world = world

    @method
    async def Prefill(  # noqa: N802 - the name is the protocol's
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> None:
        self._world.note_prefill(request)
        self._world.note_open(1)
        try:
            await self._run(request, context)
        except _Vanished:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        finally:
            self._world.note_open(-1)

    async def _run(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        script = self._world.script
        await script.reach("prefill", context)
        prompt_tokens = len(request.prompt_token_ids)
        for told, queued, computed in (("queued", True, 0), ("started", False, 0), ("", False, prompt_tokens)):
            progress = prefill_pb2.PrefillProgress(
                queued=queued, computed_tokens=computed, cached_tokens=script.cached_tokens
            )
            await context.write(prefill_pb2.PrefillResponse(progress=progress))
            await script.reach(f"prefill_{told}", context)
        await script.reach("prefill_token", context)
        first = prefill_pb2.PrefillFirstToken(choices=self._first(request), cached_tokens=script.cached_tokens)
        await context.write(prefill_pb2.PrefillResponse(first_token=first))
        await script.reach("prefill_commit", context)
        if request.HasField("ticket"):
            self._world.commits[request.ticket.transfer_id].set()
            await script.reach("prefill_committed", context)
        done = prefill_pb2.PrefillDone(
            queue_s=0.5, compute_s=1.5, exposed_s=0.25, sent_bytes=4096, sent_blocks=2, chunks=1
        )
        await context.write(prefill_pb2.PrefillResponse(done=done))

    def _first(self, request: prefill_pb2.PrefillRequest) -> list[Any]:
        firsts = []
        for choice in range(request.sampling.n):
            piece = self._world.script.pieces(choice, 0, request.sampling)[0]
            is_all = len(piece.token_ids) == 1 and piece.finish_reason is not None
            firsts.append(
                tokens_to_wire(
                    replace(
                        piece,
                        token_ids=piece.token_ids[:1],
                        logprobs=piece.logprobs[:1],
                        finish_reason=piece.finish_reason if is_all else None,
                        stop_token_id=piece.stop_token_id if is_all else None,
                    )
                )
            )
        return firsts


@dataclass
class FakeWorker:
    """A running fake, and how it looks in the registry."""

    record: WorkerRecord
    registrar: Registrar

    def set(self, *, load: WorkerLoad | None = None, ready: bool | None = None) -> None:
        """Changes what the worker reports, from the next heartbeat on, which is now."""
        changes = {name: value for name, value in (("load", load), ("ready", ready)) if value is not None}
        self.record = replace(self.record, **changes)
        self.registrar.announce()


@asynccontextmanager
async def fake_worker(world: World, tier: Tier, worker_id: str, redis_url: str) -> AsyncIterator[FakeWorker]:
    """A worker that serves and is registered until the block ends."""

    def register(server: grpc.aio.Server) -> None:
        if tier == "prefill":
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(FakePrefill(world), server)

    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(Store(redis_url))
        group = await stack.enter_async_context(service_group())
        address, _ = await stack.enter_async_context(
            serve_grpc(register, [], host="127.0.0.1", port=0, flag="--grpc-port", grace_s=0)
        )
        stream_address = ""
        if tier == "decode":
            listener = bound_socket("127.0.0.1", 0, flag="--stream-port")
            stream_address = await stack.enter_async_context(
                serve_streams(listener, decode_pb2.DecodeRequest.FromString, FakeDecode(world).serve, _failure)
            )
        record = WorkerRecord(
            worker_id=WorkerId(worker_id),
            epoch=Epoch(new_epoch()),
            tier=tier,
            grpc_address=address,
            http_address="127.0.0.1:1",
            stream_address=stream_address,
            model=NAME,
            layout=LAYOUT,
            max_num_seqs=8,
            max_model_len=MAX_POSITIONS,
            total_blocks=100,
            pid=1,
            ready=True,
            load=WorkerLoad(free_blocks=100),
        )
        worker = FakeWorker(record, None)  # type: ignore[arg-type] # the registrar needs the worker first
        worker.registrar = Registrar(store, lambda: worker.record, heartbeat_s=0.1)
        group.start(worker.registrar.run(), name="registrar")
        yield worker
