"""Matching by tag, and the bounds on strays."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.transport.base import Operation
from kvtransfer.transport.tag_matcher import Mailbox


def receive(tag: int) -> Operation:
    return Operation(tag, np.zeros(1, np.uint8))


async def test_strays_are_bounded_and_the_oldest_is_dropped() -> None:
    dropped: list[str] = []
    mailbox = Mailbox[str](dropped.append, max_early=2)
    for tag in range(4):
        assert mailbox.arrive(tag, f"m{tag}") is None
    assert dropped == ["m0", "m1"]
    assert mailbox.post(receive(2)) == "m2"
    assert mailbox.post(receive(1)) is None


async def test_the_bytes_of_strays_are_bounded_and_what_is_taken_makes_room() -> None:
    dropped: list[str] = []
    mailbox = Mailbox[str](dropped.append, max_early_bytes=10)
    mailbox.arrive(1, "too large", 11)
    mailbox.arrive(2, "oldest", 4)
    mailbox.arrive(3, "next", 6)
    assert dropped == ["too large"]
    mailbox.arrive(4, "newest", 3)
    assert dropped == ["too large", "oldest"]
    assert mailbox.post(receive(3)) == "next"
    mailbox.arrive(5, "last", 7)
    assert dropped == ["too large", "oldest"]
    assert mailbox.clear() == ([], ["newest", "last"])
    mailbox.arrive(6, "after", 10)
    assert dropped == ["too large", "oldest"]


async def test_a_second_early_message_of_a_tag_is_dropped() -> None:
    dropped: list[str] = []
    mailbox = Mailbox[str](dropped.append)
    mailbox.arrive(1, "first")
    mailbox.arrive(1, "second")
    assert dropped == ["second"]
    assert mailbox.post(receive(1)) == "first"


async def test_messages_of_a_withdrawn_tag_are_dropped_every_time() -> None:
    dropped: list[str] = []
    mailbox = Mailbox[str](dropped.append)
    posted = receive(1)
    mailbox.post(posted)
    assert mailbox.withdraw(posted)
    assert not mailbox.withdraw(posted)
    assert mailbox.arrive(1, "a") is None
    assert mailbox.arrive(1, "b") is None
    assert dropped == ["a", "b"]


async def test_a_matched_receive_cannot_be_withdrawn() -> None:
    mailbox = Mailbox[str](lambda message: None)
    posted = receive(1)
    mailbox.post(posted)
    assert mailbox.arrive(1, "a") is posted
    assert not mailbox.withdraw(posted)


@pytest.mark.parametrize("tag", [-1, 1 << 64])
async def test_a_tag_has_64_bits(tag: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        receive(tag)


async def test_a_buffer_is_a_vector_of_bytes() -> None:
    for buffer in (np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2], np.zeros(2, np.int32)):
        with pytest.raises(ValueError, match="vector of bytes"):
            Operation(1, buffer)  # type: ignore[arg-type]
