"""A decode session: the order of its events, the races between them, and what every end frees."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from decode_svc.session_events import MAX_COMMAND_BYTES, ChoicesEnded, Started
from kvtransfer.handover.reservation import Reservation
from kvtransfer.handover.ticket import Ticket
from pdserve.base.errors import (
    DigestMismatch,
    InvalidTransition,
    NoFreeBlocks,
    RequestError,
    StaleAttempt,
    StaleError,
    TransferTimeout,
)
from pdserve.engine.step import PrefillProgress, RequestStarted
from pdserve.net.streams import PeerLeft
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Failed
from tests.unit.decode_svc.session_setup import CLASS, COMMIT, GRANT, A, BusyEngine, Setup, SlowReceiver, tokens


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


async def test_the_end_is_said_and_commands_after_it_are_read_and_dropped() -> None:
    it = Setup()
    async with it.running() as task:
        it.stream.gate.set()
        it.inbox.put(ChoicesEnded())
        await it.stream.written.wait()
        assert it.stream.messages == [pb.DecodeResponse(ended=pb.DecodeEnded())]
        for _ in range(MAX_COMMAND_BYTES // 100):
            it.stream.says(stop_choice=pb.StopChoice(choice_index=0))
        it.stream.leave()
        await task
    assert it.engine.stopped.empty()
    assert it.stream.commands.empty()


async def test_chunks_of_a_local_prefill_are_reported() -> None:
    it = Setup()
    async with it.running() as task:
        it.stream.gate.set()
        it.inbox.put(PrefillProgress(request_id=A, attempt=1, num_computed=512, num_prompt=4096, num_cached=0))
        await it.stream.written.wait()
        await it.end(task)
    assert it.stream.messages[0] == pb.DecodeResponse(progress=pb.DecodeProgress(computed_tokens=512))


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


@pytest.mark.virtual_time
async def test_a_start_is_reported_with_the_time_since_its_step_started() -> None:
    it = Setup()
    async with it.running() as task:
        it.stream.gate.set()
        started = RequestStarted(request_id=A, attempt=1, prefilled_locally=True, num_cached=0, block_tables=())
        it.inbox.put(Started(started, asyncio.get_running_loop().time() - 2.5))
        await it.stream.written.wait()
        await it.end(task)
    assert it.stream.messages[0].started.computing_s == pytest.approx(2.5)


# Waits that others may prolong.
class _RenewingSlowly(SlowReceiver):
    """A receiver whose first transfer does not become quiet."""

    def __init__(self) -> None:
        super().__init__()
        self.renews = True
        self.waits, self.has_left = asyncio.Event(), asyncio.Event()

    async def grant(self, reservation: Reservation, *, attempt: int) -> Ticket:
        if attempt > 1:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.has_left.set()
        return await super().grant(reservation, attempt=attempt)


@pytest.mark.parametrize("end", ["the router leaves", "a newer attempt comes"])
async def test_a_request_that_waits_for_another_ticket_ends_at_once(end: str) -> None:
    it = Setup(receiver=_RenewingSlowly())
    receiver = it.receiver
    assert isinstance(receiver, _RenewingSlowly)
    receiver.gate.set()
    async with it.running() as task:
        await it.receive()
        it.stream.says(renew_ticket=pb.RenewTicket(attempt=2))
        await receiver.waits.wait()
        if end == "the router leaves":
            it.stream.leave()
            with pytest.raises(PeerLeft):
                await task
        else:
            it.inbox.put(Failed(error=StaleAttempt("a newer attempt took over")))
            with pytest.raises(StaleAttempt):
                await task
    assert receiver.has_left.is_set()
    assert it.engine.aborted.is_set()


async def test_a_request_that_is_over_makes_room_for_a_newer_attempt_though_its_router_keeps_the_connection() -> None:
    it = Setup()
    async with it.running() as task:
        it.stream.gate.set()
        it.inbox.put(ChoicesEnded())
        await it.stream.written.wait()
        it.inbox.put(Failed(error=StaleAttempt("a newer attempt took over")))
        await task
    assert it.stream.messages == [pb.DecodeResponse(ended=pb.DecodeEnded())]


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


@pytest.mark.parametrize(("numerics_class", "commands"), [(CLASS, ["activate"]), ("gpu", ["isolate", "activate"])])
async def test_kv_of_another_numerics_class_is_isolated(numerics_class: str, commands: list[str]) -> None:
    """That of the verified commit. Fails when a commit counts that is refused, such as a stranger's."""
    it = Setup()
    it.engine.migrating = SimpleNamespace(isolate=lambda request_id, key: it.engine.commands.append("isolate"))
    async with it.running() as task:
        await it.receive()
        refused = AsyncMock(side_effect=DigestMismatch("not signed with its ticket's key"))
        verified, it.receiver.commit = it.receiver.commit, refused  # type: ignore[method-assign]
        with pytest.raises(DigestMismatch):
            await it.session.commit(SimpleNamespace(request_id=A, numerics_class="a stranger's"))  # type: ignore[arg-type]
        it.receiver.commit = verified  # type: ignore[method-assign]
        it.receiver.numerics_class = numerics_class
        await it.session.commit(COMMIT)
        await it.end(task)
    assert it.engine.commands == commands


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
    "command", [{"renew_ticket": pb.RenewTicket(attempt=2)}, {"prefill_locally": pb.PrefillLocally(attempt=2)}]
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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ({"prefill_locally": pb.PrefillLocally(attempt=1)}, "prefill_locally"),
        ({"renew_ticket": pb.RenewTicket(attempt=1)}, "renewal"),
        ({"renew_ticket": pb.RenewTicket(attempt=2)}, "renewal"),
    ],
)
async def test_a_command_of_an_older_attempt_is_dropped_and_counted(command: dict[str, Any], message: str) -> None:
    it = Setup()
    it.receiver.renews = True
    async with it.running() as task:
        await it.receive()
        it.stream.says(renew_ticket=pb.RenewTicket(attempt=2))
        it.stream.says(**command)
        # A command that is not stale comes after it: the first one has been handled when this one has.
        it.stream.says(stop_choice=pb.StopChoice(choice_index=0))
        await it.engine.stopped.get()
        it.receiver.verify()
        await it.engine.activated.wait()
        await it.end(task)
    assert it.engine.stale == [(message, "stale_attempt")]
    assert it.engine.commands == ["activate"]
    assert it.receiver.num_aborts == 0
    assert [each.ticket.ticket.attempt for each in it.stream.messages if each.HasField("ticket")] == [1, 2]


async def test_a_grant_that_lost_the_race_against_local_prefill_hands_out_no_ticket() -> None:
    it = Setup()
    async with it.running() as task:
        it.inbox.put(pb.DecodeRequest(prefill_locally=pb.PrefillLocally(attempt=1)))
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
async def test_a_router_that_sends_faster_than_commands_are_handled_waits() -> None:
    """Fails when its request ends with an error, which the client would get as its own."""
    engine = BusyEngine()
    it = Setup(engine)
    async with it.running() as task:
        it.inbox.put(pb.DecodeRequest(stop_choice=pb.StopChoice(choice_index=0)))
        await engine.entered.wait()
        for _ in range(2000):
            it.stream.says(keep_lease=pb.KeepLease())
        for _ in range(2000):
            await asyncio.sleep(0)
        # Commands of 128 choices can wait. After the bound, nothing more is read.
        assert 128 < 2000 - it.stream.commands.qsize() < 1000
        engine.gate.set()
        it.stream.leave()
        with pytest.raises(PeerLeft):
            await task
    assert it.stream.commands.empty()


async def test_a_router_may_send_any_number_of_commands_that_are_handled_in_time() -> None:
    it = Setup()
    async with it.running() as task:
        for _ in range(2000):
            it.stream.says(stop_choice=pb.StopChoice(choice_index=0))
            await it.engine.stopped.get()
        it.stream.leave()
        with pytest.raises(PeerLeft):
            await task
