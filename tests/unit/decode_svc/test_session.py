from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decode_svc.request import DecodeJob
from decode_svc.session import DecodeSession, Finished
from pdserve.base.errors import NoFreeBlocks, RequestError
from pdserve.base.ids import RequestId
from pdserve.base.sampling import ChoiceTokens, SamplingParams
from pdserve.base.streams import PeerLeft
from pdserve.engine.step import RequestTokens
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Failed, Inbox

A = RequestId("a")
WAIT_S = 10.0
JOB = DecodeJob(request_id=A, prompt_token_ids=(1,), params=SamplingParams(), hash_key=bytes(32))


class Engine:
    """Scheduler and worker in one: takes what it is told."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    def reserve(self, job: DecodeJob) -> None:
        self.job = job

    def abort(self, request_id: RequestId) -> None:
        assert request_id == A
        self.aborted.set()

    async def run(self, fn: Callable[[], Any]) -> Any:
        return fn()


class SlowStream:
    """Takes messages one at a time, the first one when it is let go; its peer says nothing until it leaves."""

    def __init__(self) -> None:
        self.messages: list[pb.DecodeResponse] = []
        self.entered, self.gate, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def read(self) -> pb.DecodeRequest | None:
        await self.left.wait()
        return None

    async def write(self, message: pb.DecodeResponse) -> None:
        self.entered.set()
        waits = [asyncio.create_task(event.wait()) for event in (self.gate, self.left)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.gate.is_set():  # To one that has left nothing is sent.
            self.messages.append(message)

    def indices(self) -> list[list[int]]:
        return [[choice.first_index for choice in message.tokens.choices] for message in self.messages]


def tokens(index: int) -> RequestTokens:
    return RequestTokens(
        request_id=A, choices=(ChoiceTokens(choice_index=0, first_index=index, token_ids=(index + 7,)),)
    )


async def test_steps_that_pass_while_a_message_is_written_are_told_in_one_message() -> None:
    inbox: Inbox[Any] = Inbox(A, 1)
    engine, stream = Engine(), SlowStream()
    session = DecodeSession(engine, engine, None, inbox, stream, lease_s=1.0)  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(session.run(JOB))
        inbox.put(tokens(0))
        await stream.entered.wait()
        for index in (1, 2, 3):
            inbox.put(tokens(index))
        inbox.put(Finished())
        stream.gate.set()
        await engine.aborted.wait()
        stream.left.set()
    assert stream.indices() == [[0], [1, 2, 3]]


async def test_a_router_that_leaves_frees_the_request_at_once() -> None:
    inbox: Inbox[Any] = Inbox(A, 1)
    engine, stream = Engine(), SlowStream()
    session = DecodeSession(engine, engine, None, inbox, stream, lease_s=1.0)  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        running = asyncio.create_task(session.run(JOB))
        inbox.put(tokens(0))
        await stream.entered.wait()
        stream.left.set()
        with pytest.raises(PeerLeft):
            await running
    assert engine.aborted.is_set()
    assert stream.messages == []


class SlowReceiver:
    """Aborts a transfer when it is let go."""

    def __init__(self) -> None:
        self.entered, self.gate = asyncio.Event(), asyncio.Event()

    async def abort(self, transfer_id: bytes) -> None:
        self.entered.set()
        await self.gate.wait()


async def test_what_failed_is_freed_though_the_router_leaves_while_that_is_done() -> None:
    inbox: Inbox[Any] = Inbox(A, 1)
    engine, stream, receiver = Engine(), SlowStream(), SlowReceiver()
    session = DecodeSession(engine, engine, receiver, inbox, stream, lease_s=1.0)  # type: ignore[arg-type]
    session._ticket = SimpleNamespace(transfer_id=b"t")  # type: ignore[assignment]
    async with asyncio.timeout(WAIT_S):
        running = asyncio.create_task(session.run(JOB))
        inbox.put(Failed(error=NoFreeBlocks("none")))
        await receiver.entered.wait()
        stream.left.set()
        for _ in range(5):
            await asyncio.sleep(0)
        receiver.gate.set()
        with pytest.raises(NoFreeBlocks):
            await running
    assert engine.aborted.is_set()


class BusyEngine(Engine):
    """Stops a choice when it is let go."""

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


class TalkingStream(SlowStream):
    """Its peer stops a choice and then says so often that the lease is to be kept, unless it is held up."""

    def __init__(self, num_commands: int) -> None:
        super().__init__()
        self.to_come = num_commands
        self.silent = asyncio.Event()

    async def read(self) -> pb.DecodeRequest | None:
        await asyncio.sleep(0)
        if self.to_come == 0:
            self.silent.set()
            return await super().read()
        self.to_come -= 1
        return pb.DecodeRequest(keep_lease=pb.KeepLease())


async def test_a_router_that_sends_more_than_is_obeyed_is_told_and_what_waits_is_bounded() -> None:
    inbox: Inbox[Any] = Inbox(A, 1)
    engine, stream = BusyEngine(), TalkingStream(num_commands=100_000)
    session = DecodeSession(engine, engine, None, inbox, stream, lease_s=1.0)  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        inbox.put(pb.DecodeRequest(stop_choice=pb.StopChoice(choice_index=0)))
        running = asyncio.create_task(session.run(JOB))
        await engine.entered.wait()
        for _ in range(5000):
            await asyncio.sleep(0)
        # As many as would come of 128 choices wait; then nothing is read any more.
        assert 128 < 100_000 - stream.to_come < 1000
        engine.gate.set()
        with pytest.raises(RequestError, match=r"65\d{3} bytes of commands wait"):
            await running
    assert engine.aborted.is_set()


async def test_a_router_may_send_any_number_of_commands_that_are_obeyed() -> None:
    inbox: Inbox[Any] = Inbox(A, 1)
    engine, stream = Engine(), TalkingStream(num_commands=2000)
    session = DecodeSession(engine, engine, None, inbox, stream, lease_s=1.0)  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        running = asyncio.create_task(session.run(JOB))
        await stream.silent.wait()
        stream.left.set()
        with pytest.raises(PeerLeft):
            await running
