"""Blocks are digested as xxhash does it, on every instruction set, and copied in the same pass."""

from __future__ import annotations

import threading
from types import ModuleType

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.cpu import native
from kernels.cpu.digest import LEAST_BYTES, Blocks, can_digest, digest_blocks

EXTENSION = native.load()
pytestmark = pytest.mark.skipif(EXTENSION is None, reason="the C++ kernels were not built")
SOURCE = np.random.default_rng(5).integers(0, 256, 1 << 17, np.uint8)
SMALL = 512
SEEDS = st.sampled_from([0, 1, (1 << 64) - 1, 0x123456789ABCDEF])


def instruction_sets() -> list[str]:
    assert isinstance(EXTENSION, ModuleType)
    return list(EXTENSION.instruction_sets())


def starts(*given: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(given, np.int64)


@given(st.integers(LEAST_BYTES, 20_000), st.integers(0, 130), st.integers(0, 130), SEEDS)
@example(1024, 0, 0, 1)
@example(1025, 0, 0, 1)
@example(1088, 64, 64, 1)
@example(100_000, 64, 0, 1)
def test_digests_are_those_of_xxhash_and_copies_are_whole(num_bytes: int, start: int, into: int, seed: int) -> None:
    for instruction_set in instruction_sets():
        blocks = Blocks(SOURCE, starts(start, start + 5))
        expected = [xxhash.xxh3_128_digest(SOURCE[at : at + num_bytes].data, seed) for at in (start, start + 5)]
        found = digest_blocks(blocks, num_bytes, seed, instruction_set=instruction_set)
        assert list(map(bytes, found)) == expected
        target = np.zeros(2 * num_bytes + 300, np.uint8)
        own = starts(into + num_bytes + 30, into)
        found = digest_blocks(blocks, num_bytes, seed, target=Blocks(target, own), instruction_set=instruction_set)
        assert list(map(bytes, found)) == expected
        for at, copied in zip((start, start + 5), own.tolist(), strict=True):
            assert np.array_equal(target[copied : copied + num_bytes], SOURCE[at : at + num_bytes])
            target[copied : copied + num_bytes] = 0
        assert not target.any()


def test_what_was_stored_is_what_was_digested_though_the_source_changes() -> None:
    """Another process may write to the source: then digest and copy have to be of the same bytes, whatever they are."""
    source, copies = np.zeros(SMALL, np.uint8), np.zeros(SMALL * 200 + 64, np.uint8)
    copies = copies[-copies.ctypes.data % 64 :][: SMALL * 200]
    into = Blocks(copies, np.arange(0, SMALL * 200, SMALL))
    contents = Blocks(np.repeat(np.array([0, 255], np.uint8), SMALL), np.tile([0, SMALL], 2000))
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            digest_blocks(contents, SMALL, 5, target=Blocks(source, np.zeros(4000, np.int64)))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for instruction_set in instruction_sets():
            for _ in range(100):
                given = Blocks(source, np.zeros(200, np.int64))
                found = digest_blocks(given, SMALL, 5, target=into, instruction_set=instruction_set)
                stored = copies.reshape(200, SMALL)
                expected = [xxhash.xxh3_128_digest(block.data, 5) for block in stored]
                assert list(map(bytes, found)) == expected, instruction_set
    finally:
        is_over.set()
        writer.join()


def test_no_block_is_read_or_written_outside_of_its_memory() -> None:
    target = np.zeros(1000, np.uint8)
    for at in (-1, len(SOURCE) - 999, 1 << 62):
        with pytest.raises(ValueError, match="lies outside"):
            digest_blocks(Blocks(SOURCE, starts(0, at)), 1000, 1)
    with pytest.raises(ValueError, match="lies outside"):
        digest_blocks(Blocks(SOURCE, starts(0)), 1000, 1, target=Blocks(target, starts(1)))
    assert not target.any()


def test_small_blocks_have_another_digest_which_this_is_not() -> None:
    assert not can_digest(LEAST_BYTES - 1)
    assert can_digest(LEAST_BYTES)
    with pytest.raises(ValueError, match="smaller than 241"):
        digest_blocks(Blocks(SOURCE, starts(0)), LEAST_BYTES - 1, 1)


def test_no_blocks_have_no_digests() -> None:
    assert digest_blocks(Blocks(SOURCE, starts()), 1000, 1).shape == (0, 16)
