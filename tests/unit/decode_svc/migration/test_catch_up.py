"""Tokens of the worker that a request leaves are taken in between two steps, all that have come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decode_svc.migration.catch_up import CatchUpQueue
from decode_svc.session_events import MAX_COMMAND_BYTES, WaitingCommands
from pdserve.base.errors import Diverged
from pdserve.base.ids import RequestId
from pdserve.base.sampling import ChoiceTokens
from pdserve.base.tasks import service_group
from pdserve.v1 import common_pb2
from pdserve.v1 import decode_pb2 as pb
from tests.support.deadline import DEADLINE_S


class Steps:
    """A worker whose steps end when the test says so, and the moves in it."""

    def __init__(self) -> None:
        self.between: asyncio.Queue[None] = asyncio.Queue()
        self.taken: list[list[int]] = []
        self.changed = asyncio.Event()
        self.error: Exception | None = None

    async def run(self, fn: Callable[[], Any]) -> Any:
        await self.between.get()
        return fn()

    def catch_up(self, request_id: RequestId, known: list[ChoiceTokens]) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append([each.first_index for each in known])
        self.changed.set()


def command(first_index: int, num_tokens: int = 1) -> pb.DecodeRequest:
    tokens = common_pb2.ChoiceTokens(choice_index=0, first_index=first_index, token_ids=[7] * num_tokens)
    return pb.DecodeRequest(catch_up=pb.CatchUp(choices=[tokens]))


def catching_up(steps: Steps, backlog: WaitingCommands | None = None) -> CatchUpQueue:
    worker: Any = steps
    moves: Any = SimpleNamespace(catch_up=steps.catch_up)
    return CatchUpQueue(worker, moves, RequestId("a"), backlog or WaitingCommands())


async def test_all_that_has_come_is_taken_in_between_the_same_two_steps() -> None:
    steps = Steps()
    known = catching_up(steps)
    async with asyncio.timeout(DEADLINE_S), service_group() as tasks:
        for first_index in (5, 6, 7):
            known.take(command(first_index), tasks)
        for expected in ([5, 6, 7], [8]):
            steps.changed.clear()
            steps.between.put_nowait(None)
            await steps.changed.wait()
            assert steps.taken[-1] == expected
            known.take(command(8), tasks)
    assert len(steps.taken) == 2


async def test_an_error_ends_the_session() -> None:
    steps = Steps()
    steps.error = Diverged("other tokens")
    with pytest.raises(Diverged):
        async with asyncio.timeout(DEADLINE_S), service_group() as tasks:
            catching_up(steps).take(command(5), tasks)
            steps.between.put_nowait(None)
            await asyncio.Event().wait()


async def test_tokens_count_until_a_step_has_taken_them() -> None:
    """Fails when a router that is far ahead is taken for a wrong request, or can fill the memory."""
    steps, backlog, large = Steps(), WaitingCommands(), command(5, num_tokens=MAX_COMMAND_BYTES)
    known = catching_up(steps, backlog)
    async with asyncio.timeout(DEADLINE_S), service_group() as tasks:
        backlog.add(large)
        known.take(large, tasks)
        waiting = asyncio.ensure_future(backlog.wait_for_room())
        await asyncio.sleep(0)
        assert not waiting.done()
        steps.between.put_nowait(None)
        await waiting
    assert steps.taken == [[5]]
