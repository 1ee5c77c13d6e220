"""A decode session with an engine, a router and a receiver that each answer when the test lets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from decode_svc.request import DecodeJob
from decode_svc.session import DecodeSession
from decode_svc.session_events import ChoicesEnded
from kvtransfer.handover.reservation import Received, Reservation
from kvtransfer.handover.ticket import Ticket
from pdserve.base.errors import StaleError, reason_of
from pdserve.base.ids import BlockId, Epoch, RequestId, TransferId, WorkerId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import ChoiceTokens, SamplingParams
from pdserve.engine.step import Grant, RequestTokens
from pdserve.peers.seals import Seals
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Failed, Inbox

A = RequestId("a")
WAIT_S = 10.0
JOB = DecodeJob(request_id=A, prompt_token_ids=(1,), params=SamplingParams(), hash_key=bytes(32))
GRANT = Grant(
    request_id=A, attempt=1, block_tables=((BlockId(3), BlockId(4)),), num_cached_blocks=1, first_missing=(1,)
)
COMMIT: Any = SimpleNamespace(request_id=A)
#: Numerics class of the worker.
CLASS = "cpu/avx2"


class Engine:
    """Scheduler and worker in one: notes its commands."""

    def __init__(self) -> None:
        self.activated, self.aborted = asyncio.Event(), asyncio.Event()
        self.commands: list[str] = []
        self.stopped: asyncio.Queue[int] = asyncio.Queue()
        self.refusal: Exception | None = None
        self.stale: list[tuple[str, str]] = []
        self.metrics = SimpleNamespace(
            ended=lambda reason: None, stale=lambda message, error: self.stale.append((message, reason_of(error)))
        )
        self.seals = Seals()
        self.numerics_class = CLASS
        self.migrating: Any = SimpleNamespace()

    def reserve(self, job: DecodeJob) -> None:
        self.job = job

    def activate(self, request_id: RequestId, first_tokens: tuple[int, ...]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.commands.append("activate")
        self.activated.set()

    def prefill_locally(self, request_id: RequestId, forced_first_tokens: tuple[int, ...]) -> None:
        self.commands.append("prefill_locally")

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self.stopped.put_nowait(choice)

    def abort(self, request_id: RequestId) -> None:
        assert request_id == A
        self.aborted.set()

    async def run(self, fn: Callable[[], Any], *, ends: RequestId | None = None) -> Any:
        return fn()


class SlowStream:
    """Takes the first message once its gate opens; its peer sends commands only by `says`, until it leaves."""

    def __init__(self) -> None:
        self.messages: list[pb.DecodeResponse] = []
        self.entered, self.gate, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.written, self.has_seen_end = asyncio.Event(), asyncio.Event()
        self.commands: asyncio.Queue[pb.DecodeRequest | None] = asyncio.Queue()

    def says(self, **command: Any) -> None:
        self.commands.put_nowait(pb.DecodeRequest(**command))

    def leave(self) -> None:
        self.left.set()
        self.commands.put_nowait(None)

    async def read(self) -> pb.DecodeRequest | None:
        command = await self.commands.get()
        if command is None:
            self.has_seen_end.set()
        return command

    async def write(self, message: pb.DecodeResponse) -> None:
        self.entered.set()
        waits = [asyncio.create_task(event.wait()) for event in (self.gate, self.left)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.gate.is_set():  # A peer that has left gets nothing.
            self.messages.append(message)
            self.written.set()

    def indices(self) -> list[list[int]]:
        return [
            [choice.first_index for choice in message.tokens.choices]
            for message in self.messages
            if message.HasField("tokens")
        ]


class SlowReceiver:
    """Grants tickets and verifies commits at once, and aborts a transfer once its gate opens."""

    def __init__(self) -> None:
        self.entered, self.gate = asyncio.Event(), asyncio.Event()
        self.reservation: Reservation | None = None
        self.num_aborts = 0
        self.renews = False
        self.numerics_class = CLASS

    async def grant(self, reservation: Reservation, *, attempt: int) -> Ticket:
        self.reservation = reservation
        return Ticket(
            transfer_id=TransferId(bytes(16)),
            attempt=attempt,
            worker_id=WorkerId("d"),
            epoch=Epoch(1),
            grpc_address="",
            transport="inproc",
            data_address=b"",
            first_block=reservation.first_blocks[0],
            num_blocks=len(reservation.block_ids[0]),
            layout=KvLayout.uniform(model="m", dtype="float32", block_size=4, num_layers=1, num_kv_heads=1, head_dim=1),
            lease_s=reservation.lease_s,
            key=bytes(32),
            tag_base=0,
            layer_groups=1,
            bundle_blocks=1,
            digest="xxh3",
        )

    def verify(self) -> Received:
        assert self.reservation is not None
        received = Received(
            request_id=A,
            transfer_id=TransferId(bytes(16)),
            first_tokens=(5,),
            received_blocks=1,
            received_bytes=64,
            receive_s=0.0,
            numerics_class=self.numerics_class,
        )
        self.reservation.on_received(received)
        return received

    async def commit(self, commit: object) -> Received:
        return self.verify()

    async def abort(self, transfer_id: bytes) -> None:
        self.num_aborts += 1
        self.entered.set()
        await self.gate.wait()

    async def renew(self, transfer_id: bytes, *, attempt: int) -> Ticket:
        if not self.renews:
            raise StaleError("the reservation is over")
        assert self.reservation is not None
        return await self.grant(self.reservation, attempt=attempt)


class WatchedInbox(Inbox[Any]):
    """An inbox that shows when a failure was put into it."""

    def __init__(self) -> None:
        super().__init__(A, 1)
        self.has_failed = asyncio.Event()

    def put(self, event: Any) -> None:
        super().put(event)
        if isinstance(event, Failed):
            self.has_failed.set()


class Setup:
    """A session and all that it talks to."""

    def __init__(self, engine: Engine | None = None, receiver: SlowReceiver | None = None) -> None:
        self.engine, self.stream, self.receiver = engine or Engine(), SlowStream(), receiver or SlowReceiver()
        self.inbox = WatchedInbox()
        worker: Any = self.engine
        transfers: Any = SimpleNamespace(receiver=self.receiver)
        stream: Any = self.stream
        self.session = DecodeSession(worker, worker, transfers, self.inbox, stream, lease_s=1.0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        async with asyncio.timeout(WAIT_S):
            task = asyncio.create_task(self.session.run(JOB))
            try:
                yield task
            finally:
                task.cancel()

    async def receive(self) -> None:
        """The blocks are granted, and the router has the ticket."""
        self.stream.gate.set()
        self.inbox.put(GRANT)
        await self.stream.written.wait()

    async def end(self, task: asyncio.Task[None]) -> None:
        """The last token was sampled, and the router leaves."""
        self.inbox.put(ChoicesEnded())
        await self.engine.aborted.wait()
        self.stream.leave()
        await task


def tokens(index: int) -> RequestTokens:
    return RequestTokens(
        request_id=A, attempt=1, choices=(ChoiceTokens(choice_index=0, first_index=index, token_ids=(index + 7,)),)
    )


class BusyEngine(Engine):
    """Stops a choice once its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = asyncio.Event(), asyncio.Event()

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self.entered.set()

    async def run(self, fn: Callable[[], Any], *, ends: RequestId | None = None) -> Any:
        result = fn()
        if self.entered.is_set():
            await self.gate.wait()
        return result
