"""What the worker that a request moves to is given, and whose hand-off an answer is about."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.base.errors import StaleError
from pdserve.base.wire import error_to_wire
from pdserve.v1 import decode_pb2
from router_svc.request.migration.catch_up_policy import CatchUpPolicy
from router_svc.request.migration.target import MigrationTarget
from tests.support.deadline import DEADLINE_S

#: What a worker of the last release holds of commands that wait.
HELD_BYTES = 1 << 16


class Target:
    """The call to the worker that a request moves to."""

    def __init__(self) -> None:
        self.worker = SimpleNamespace(worker_id="decode-1")
        self.sent: list[decode_pb2.DecodeRequest] = []
        self.is_closed = False

    async def send(self, command: decode_pb2.DecodeRequest) -> None:
        self.sent.append(command)

    def close(self) -> None:
        self.is_closed = True

    def tokens(self) -> list[int]:
        choices = [each for command in self.sent for each in command.catch_up.choices]
        assert [each.first_index for each in choices] == [
            sum(len(before.token_ids) for before in choices[:index]) for index in range(len(choices))
        ]
        return [token for each in choices for token in each.token_ids]


def follower_of(tokens: list[int], target: Target, number: int = 2) -> MigrationTarget:
    output = SimpleNamespace(over=set[int](), open_lengths={0: len(tokens)}, tokens_of=lambda choice: tokens)
    journal, source = SimpleNamespace(append=lambda event: None), SimpleNamespace(worker=None)
    prompt = SimpleNamespace(output=output, delivery=None, journal=journal)
    follower = MigrationTarget(cast(Any, prompt), cast(Any, source), cast(Any, target), lambda: None, number=number)
    follower._policy = CatchUpPolicy({})
    return follower


@pytest.mark.parametrize(("number", "ends"), [(1, False), (2, True), (0, True)], ids=["earlier", "this", "not named"])
def test_an_error_of_an_earlier_hand_off_ends_no_later_move(number: int, ends: bool) -> None:
    """Fails when an answer counts for the move that is under way. A worker of the last release names none."""
    target = Target()
    follower = follower_of([], target)
    failed = decode_pb2.HandedOff(number=number, sent_blocks=7, error=error_to_wire(StaleError("it was preempted")))
    follower.handed_off(failed)
    assert target.is_closed is ends
    assert follower.sent_blocks == (7 if ends else 0)


async def test_many_tokens_come_in_pieces_each_after_the_target_was_heard() -> None:
    """Fails when all come at once: a worker of the last release refused the request then, as its client's fault."""
    target, tokens = Target(), [250_000] * 100_000
    follower = follower_of(tokens, target)
    async with asyncio.TaskGroup() as group:
        giving = group.create_task(follower._give(in_steps=True))
        for count in range(1, 14):
            await asyncio.sleep(0)
            assert len(target.sent) == count
            assert target.sent[-1].ByteSize() < HELD_BYTES // 2
            follower._has_heard.set()
            await asyncio.sleep(0)
        await giving
    assert target.tokens() == tokens


async def test_a_target_that_takes_over_gets_all_at_once() -> None:
    """It may be its reader that gives them: nothing is heard meanwhile."""
    target, tokens = Target(), list(range(20_000))
    await follower_of(tokens, target)._give()
    assert target.tokens() == tokens
    assert len(target.sent) == 3


async def test_a_target_that_takes_over_while_pieces_wait_gets_the_rest() -> None:
    """Fails when the pieces wait for the reader that hands over: the request would hang."""
    target, tokens = Target(), list(range(40_000))
    follower = follower_of(tokens, target)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(follower._give(in_steps=True))
        await asyncio.sleep(0)
        await follower.take_over()
    assert target.tokens() == tokens
