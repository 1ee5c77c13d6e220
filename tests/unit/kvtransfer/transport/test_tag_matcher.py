"""Messages are matched to receives by tag, and early ones are bounded."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.transport.base import Operation
from kvtransfer.transport.tag_matcher import TagMatcher


def receive(tag: int) -> Operation:
    return Operation(tag, np.zeros(1, np.uint8))


async def test_the_number_of_early_messages_is_bounded_and_the_oldest_is_dropped() -> None:
    dropped: list[str] = []
    matcher = TagMatcher[str](dropped.append, max_early=2)
    for tag in range(4):
        assert matcher.arrive(tag, f"m{tag}") is None
    assert dropped == ["m0", "m1"]
    assert matcher.post(receive(2)) == "m2"
    assert matcher.post(receive(1)) is None


async def test_the_bytes_of_early_messages_are_bounded_until_they_are_received() -> None:
    dropped: list[str] = []
    matcher = TagMatcher[str](dropped.append, max_early_bytes=10)
    matcher.arrive(1, "too large", 11)
    matcher.arrive(2, "oldest", 4)
    matcher.arrive(3, "next", 6)
    assert dropped == ["too large"]
    matcher.arrive(4, "newest", 3)
    assert dropped == ["too large", "oldest"]
    assert matcher.post(receive(3)) == "next"
    matcher.arrive(5, "last", 7)
    assert dropped == ["too large", "oldest"]
    assert matcher.clear() == ([], ["newest", "last"])
    matcher.arrive(6, "after", 10)
    assert dropped == ["too large", "oldest"]


async def test_a_second_early_message_of_a_tag_is_dropped() -> None:
    dropped: list[str] = []
    matcher = TagMatcher[str](dropped.append)
    matcher.arrive(1, "first")
    matcher.arrive(1, "second")
    assert dropped == ["second"]
    assert matcher.post(receive(1)) == "first"


async def test_messages_of_a_withdrawn_tag_are_dropped_every_time() -> None:
    dropped: list[str] = []
    matcher = TagMatcher[str](dropped.append)
    posted = receive(1)
    matcher.post(posted)
    assert matcher.withdraw(posted)
    assert not matcher.withdraw(posted)
    assert matcher.arrive(1, "a") is None
    assert matcher.arrive(1, "b") is None
    assert dropped == ["a", "b"]


async def test_a_matched_receive_cannot_be_withdrawn() -> None:
    matcher = TagMatcher[str](lambda message: None)
    posted = receive(1)
    matcher.post(posted)
    assert matcher.arrive(1, "a") is posted
    assert not matcher.withdraw(posted)


@pytest.mark.parametrize("tag", [-1, 1 << 64])
async def test_a_tag_has_64_bits(tag: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        receive(tag)


async def test_a_buffer_is_a_vector_of_bytes() -> None:
    for buffer in (np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2], np.zeros(2, np.int32)):
        with pytest.raises(ValueError, match="vector of bytes"):
            Operation(1, buffer)  # type: ignore[arg-type]
