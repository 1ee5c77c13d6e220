"""A decode session between a router, an engine and a receiver, each of which answers when the test lets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from decode_svc.request import DecodeJob
from decode_svc.session import ChoicesEnded, DecodeSession
from kvtransfer.handover.reservation import Received, Reservation
from kvtransfer.handover.ticket import Ticket
from pdserve.base.errors import InvalidTransition, NoFreeBlocks, RequestError, StaleError, TransferTimeout
from pdserve.base.ids import BlockId, Epoch, RequestId, TransferId, WorkerId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import ChoiceTokens, SamplingParams
from pdserve.base.streams import PeerLeft
from pdserve.engine.step import Grant, RequestTokens
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Failed, Inbox

A = RequestId("a")
WAIT_S = 10.0
JOB = DecodeJob(request_id=A, prompt_token_ids=(1,), params=SamplingParams(), hash_key=bytes(32))
GRANT = Grant(request_id=A, block_table=(BlockId(3), BlockId(4)), num_cached_blocks=1)
COMMIT: Any = SimpleNamespace(request_id=A)


class Engine:
    """Scheduler and worker in one: notes its commands."""

    def __init__(self) -> None:
        self.activated, self.aborted = asyncio.Event(), asyncio.Event()
        self.commands: list[str] = []
        self.stopped: asyncio.Queue[int] = asyncio.Queue()
        self.refusal: Exception | None = None
        self.metrics = SimpleNamespace(ended=lambda reason: None)

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

    async def run(self, fn: Callable[[], Any]) -> Any:
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
        return [[choice.first_index for choice in message.tokens.choices] for message in self.messages]


class SlowReceiver:
    """Grants tickets and verifies commits at once, and aborts a transfer once its gate opens."""

    def __init__(self) -> None:
        self.entered, self.gate = asyncio.Event(), asyncio.Event()
        self.reservation: Reservation | None = None
        self.num_aborts = 0

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
            first_block=reservation.first_block,
            num_blocks=len(reservation.block_ids),
            layout=KvLayout(model="m", dtype="float32", block_size=4, num_layers=1, num_kv_heads=1, head_dim=1),
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
        raise StaleError("the reservation is over")


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

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine, self.stream, self.receiver = engine or Engine(), SlowStream(), SlowReceiver()
        self.inbox = WatchedInbox()
        worker: Any = self.engine
        receiver: Any = self.receiver
        stream: Any = self.stream
        self.session = DecodeSession(worker, worker, receiver, self.inbox, stream, lease_s=1.0)

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
        request_id=A, choices=(ChoiceTokens(choice_index=0, first_index=index, token_ids=(index + 7,)),)
    )


# Tokens, and how a session ends.
async def test_steps_that_end_while_a_message_is_written_are_reported_in_one_message() -> None:
    it = Setup()
    async with it.running() as task:
        it.inbox.put(tokens(0))
        await it.stream.entered.wait()
        for index in (1, 2, 3):
            it.inbox.put(tokens(index))
        it.stream.gate.set()
        await it.end(task)
    assert it.stream.indices() == [[0], [1, 2, 3]]


async def test_a_router_that_leaves_frees_the_request_at_once() -> None:
    it = Setup()
    async with it.running() as task:
        it.inbox.put(tokens(0))
        await it.stream.entered.wait()
        it.stream.leave()
        with pytest.raises(PeerLeft):
            await task
    assert it.engine.aborted.is_set()
    assert it.stream.messages == []


async def test_a_failed_request_is_freed_even_if_the_router_leaves_in_the_meantime() -> None:
    it = Setup()
    async with it.running() as task:
        await it.receive()
        it.inbox.put(Failed(error=NoFreeBlocks("none")))
        await it.receiver.entered.wait()
        it.stream.leave()
        await it.stream.has_seen_end.wait()
        assert not it.engine.aborted.is_set()
        it.receiver.gate.set()
        with pytest.raises(NoFreeBlocks):
            await task
    assert it.engine.aborted.is_set()


# Received KV.
async def test_a_commit_returns_when_the_sequences_are_queued_to_run() -> None:
    it = Setup()
    async with it.running() as task:
        await it.receive()
        received = await it.session.commit(COMMIT)
        assert received.first_tokens == (5,)
        assert it.engine.commands == ["activate"]
        await it.end(task)
    assert it.receiver.num_aborts == 0, "a transfer that was committed is not withdrawn"


async def test_received_kv_is_activated_though_the_caller_of_commit_has_gone() -> None:
    it = Setup()
    async with it.running() as task:
        await it.receive()
        it.receiver.verify()
        await it.engine.activated.wait()
        await it.end(task)


async def test_all_calls_of_a_repeated_commit_are_answered() -> None:
    it = Setup()
    async with it.running() as task:
        await it.receive()
        received = it.receiver.verify()
        it.receiver.commit = AsyncMock(return_value=received)  # type: ignore[method-assign]
        assert await asyncio.gather(it.session.commit(COMMIT), it.session.commit(COMMIT)) == [received] * 2
        await it.end(task)
    assert it.engine.commands == ["activate"]


async def test_a_commit_is_refused_with_the_error_that_activation_failed_with() -> None:
    it = Setup()
    it.engine.refusal = RequestError("no such tokens")
    async with it.running() as task:
        await it.receive()
        with pytest.raises(RequestError, match="no such tokens"):
            await it.session.commit(COMMIT)
        with pytest.raises(RequestError, match="no such tokens"):
            await task
    assert it.engine.aborted.is_set()


async def test_a_commit_is_refused_when_the_request_ends_before_its_kv_is_activated() -> None:
    it = Setup()
    async with it.running() as task:
        await it.receive()
        it.inbox.put(Failed(error=TransferTimeout("no progress")))
        with pytest.raises(StaleError, match="ended before its received KV was activated"):
            await it.session.commit(COMMIT)
        with pytest.raises(TransferTimeout):
            await task
    assert it.engine.commands == []


@pytest.mark.parametrize(
    "command", [{"renew_ticket": pb.RenewTicket(attempt=2)}, {"prefill_locally": pb.PrefillLocally()}]
)
async def test_a_command_that_lost_the_race_against_a_commit_changes_nothing(command: dict[str, Any]) -> None:
    it = Setup()
    async with it.running() as task:
        await it.receive()
        it.inbox.put(pb.DecodeRequest(**command))
        it.receiver.verify()
        await it.end(task)
    assert it.engine.commands == ["activate"]
    assert it.receiver.num_aborts == 0


async def test_a_grant_that_lost_the_race_against_local_prefill_hands_out_no_ticket() -> None:
    it = Setup()
    async with it.running() as task:
        it.inbox.put(pb.DecodeRequest(prefill_locally=pb.PrefillLocally()))
        it.inbox.put(GRANT)
        await it.end(task)
    assert it.engine.commands == ["prefill_locally"]
    assert it.receiver.reservation is None
    assert it.stream.messages == []


async def test_a_ticket_can_be_renewed_only_once_it_was_granted() -> None:
    it = Setup()
    async with it.running() as task:
        it.stream.says(renew_ticket=pb.RenewTicket(attempt=2))
        with pytest.raises(InvalidTransition, match="has no ticket that could be renewed"):
            await task


# Commands.
class BusyEngine(Engine):
    """Stops a choice once its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = asyncio.Event(), asyncio.Event()

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self.entered.set()

    async def run(self, fn: Callable[[], Any]) -> Any:
        result = fn()
        if self.entered.is_set():
            await self.gate.wait()
        return result


async def test_a_router_that_sends_faster_than_commands_are_handled_is_refused_at_a_bound() -> None:
    engine = BusyEngine()
    it = Setup(engine)
    async with it.running() as task:
        it.inbox.put(pb.DecodeRequest(stop_choice=pb.StopChoice(choice_index=0)))
        await engine.entered.wait()
        for _ in range(2000):
            it.stream.says(keep_lease=pb.KeepLease())
        await it.inbox.has_failed.wait()
        # Commands of 128 choices can wait. After the bound, nothing more is read.
        assert 128 < 2000 - it.stream.commands.qsize() < 1000
        engine.gate.set()
        with pytest.raises(RequestError, match=r"65\d{3} bytes of commands waiting, limit 65536"):
            await task
    assert engine.aborted.is_set()


async def test_a_router_may_send_any_number_of_commands_that_are_handled_in_time() -> None:
    it = Setup()
    async with it.running() as task:
        for _ in range(2000):
            it.stream.says(stop_choice=pb.StopChoice(choice_index=0))
            await it.engine.stopped.get()
        it.stream.leave()
        with pytest.raises(PeerLeft):
            await task
