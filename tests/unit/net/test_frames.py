"""Messages in a stream of bytes, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.net.frames import Frames, framed


@given(messages=st.lists(st.binary(max_size=40)), size=st.integers(1, 50), count=st.integers(1, 5))
def test_messages_are_the_same_however_the_bytes_are_cut(messages: list[bytes], size: int, count: int) -> None:
    data, frames, taken = b"".join(map(framed, messages)), Frames(40), list[bytes]()
    for start in range(0, len(data), size):
        frames.add(data[start : start + size])
        taken += frames.take(count)
    while frames.has_more:
        taken += frames.take(count)
    assert taken == messages


def test_a_flood_of_tiny_messages_is_taken_in_pieces() -> None:
    frames = Frames(10)
    frames.add(framed(b"") * 100_000)
    assert len(frames.take(64)) == 64
    assert frames.has_more


def test_a_message_that_is_too_large_is_refused_by_its_length() -> None:
    frames = Frames(10)
    frames.add(framed(b"x" * 11)[:4])
    with pytest.raises(ValueError, match="11 bytes"):
        frames.take(1)
    frames.clear()
    assert not frames.has_more
