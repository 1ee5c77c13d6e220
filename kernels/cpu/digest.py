"""XXH3 of blocks of host memory, found by C++ while it copies them: each byte is read once, on the calling thread."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu import native

#: XXH3 has other rules for shorter messages, which the kernel does not have.
LEAST_BYTES = 241
DIGEST_BYTES = 16


def can_digest(num_bytes: int) -> bool:
    """Whether the extension is there, and takes blocks of this size."""
    return num_bytes >= LEAST_BYTES and native.load() is not None


class Blocks(NamedTuple):
    """Where blocks begin in a memory."""

    #: uint8 [n], contiguous.
    memory: npt.NDArray[np.uint8]
    #: int64 [blocks], contiguous, in bytes.
    starts: npt.NDArray[np.int64]


def digest_blocks(
    source: Blocks, num_bytes: int, seed: int, *, target: Blocks | None = None, instruction_set: str = ""
) -> npt.NDArray[np.uint8]:
    """XXH3 with 128 bits and this seed of each block of `num_bytes`: uint8 [blocks, 16], as xxhash's `digest`.

    Copies block i of `source` to block i of `target`; the two share no memory. Releases the GIL. `instruction_set`: one
    of `_native.instruction_sets()`; by default the best.
    Raises: ValueError for blocks that are too small, or lie outside of their memory.
    """
    extension = native.load()
    assert extension is not None
    if num_bytes < LEAST_BYTES:
        raise ValueError(f"Blocks of {num_bytes} bytes are smaller than {LEAST_BYTES}.")
    into, into_starts = (0, 0) if target is None else _addresses(target, num_bytes)
    assert target is None or (target.memory.flags.writeable and len(target.starts) == len(source.starts))
    digests = np.empty((len(source.starts), DIGEST_BYTES), np.uint8)
    extension.digest_blocks(
        instruction_set,
        *_addresses(source, num_bytes),
        into,
        into_starts,
        len(source.starts),
        num_bytes,
        seed,
        _address(digests),
    )
    return digests


def _addresses(blocks: Blocks, num_bytes: int) -> tuple[int, int]:
    memory, starts = blocks
    assert memory.dtype == np.uint8
    assert memory.flags.c_contiguous
    assert starts.dtype == np.int64
    assert starts.flags.c_contiguous
    if len(starts) and not 0 <= starts.min() <= starts.max() <= memory.nbytes - num_bytes:
        raise ValueError(f"A block of {num_bytes} bytes lies outside of its memory of {memory.nbytes} bytes.")
    return _address(memory), _address(starts)


def _address(array: npt.NDArray[np.uint8] | npt.NDArray[np.int64]) -> int:
    return int(array.__array_interface__["data"][0])
