"""What two processes say to each other over a Unix socket of packets. Pure.

sender                           receiver
HELLO token, count          ->
MEMORY id, size, descriptor ->                  maps the memory; GPU_MEMORY: that of a GPU; PINNED_MEMORY: for its GPU
                            <-   REFUSED why    it cannot, and closes
                            <-   WELCOME        when the first `count` memories are mapped
OFFER id, messages, starts  ->                  copies the messages' blocks into its own
                            <-   TAKEN tag      the sender may use the blocks of the offer with that first tag again
FORGET id                   ->                  unmaps the memory
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from kvtransfer.transport.local.address import TOKEN_BYTES
from kvtransfer.transport.local.offer import MAX_BLOCKS, Offer

#: First byte of each packet. A release that offers otherwise says HELLO with another byte, and is refused.
HELLO, WELCOME, MEMORY, GPU_MEMORY, PINNED_MEMORY, REFUSED = b"h", b"W", b"M", b"G", b"P", b"R"
OFFER, TAKEN, FORGET = b"O", b"T", b"F"

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
_OFFER = struct.Struct("<IQIIQ")
_TAG = struct.Struct("<Q")
_MEMORY = struct.Struct("<IQ")
_FORGET = struct.Struct("<I")
_START_BYTES = 8
MAX_PACKET_BYTES = 1 + _OFFER.size + MAX_BLOCKS * _START_BYTES
_MAX_MEMORY_BYTES = 1 << 62
_MAX_REASON_BYTES = 1000


class Malformed(Exception):
    """A packet that no process of this version sends."""


def hello(token: bytes, num_memories: int) -> bytes:
    """The first packet, which that many memories follow."""
    return HELLO + _HELLO.pack(token, num_memories)


def read_hello(body: bytes) -> tuple[bytes, int]:
    """Token and number of memories. Raises `Malformed`."""
    token, num_memories = _fields(_HELLO, body)
    return token, num_memories


def offer(memory: int, given: Offer) -> bytes:
    """The packet with an offer of blocks in that memory."""
    assert 0 < len(given.starts) <= MAX_BLOCKS
    fields = _OFFER.pack(memory, given.first_tag, given.tag_step, given.num_messages, given.block_bytes)
    return OFFER + fields + given.starts.astype("<i8").tobytes()


def read_offer(body: bytes) -> tuple[int, Offer]:
    """Number of the memory, and the offer; its blocks may lie behind the memory's end. Raises `Malformed`."""
    if len(body) < _OFFER.size + _START_BYTES or (len(body) - _OFFER.size) % _START_BYTES:
        raise Malformed
    memory, first_tag, tag_step, num_messages, block_bytes = _OFFER.unpack_from(body)
    starts = np.frombuffer(body, "<i8", offset=_OFFER.size).astype(np.int64)
    if not 0 < num_messages <= len(starts) or not 0 < block_bytes <= _MAX_MEMORY_BYTES or starts.min() < 0:
        raise Malformed
    return memory, Offer(
        first_tag=first_tag, tag_step=tag_step, num_messages=num_messages, block_bytes=block_bytes, starts=starts
    )


def taken(tag: int) -> bytes:
    """The packet that ends an offer."""
    return TAKEN + _TAG.pack(tag)


def read_taken(body: bytes) -> int:
    """The offer's first tag. Raises `Malformed`."""
    (tag,) = _fields(_TAG, body)
    return int(tag)


def memory(number: int, num_bytes: int, kind: bytes = MEMORY) -> bytes:
    """The packet that comes with a descriptor of `num_bytes` of memory of a kind: the packet's first byte."""
    return kind + _MEMORY.pack(number, num_bytes)


def read_memory(body: bytes) -> tuple[int, int]:
    """Number and size in bytes. Raises `Malformed`."""
    number, num_bytes = _fields(_MEMORY, body)
    return number, num_bytes


def refused(reason: str) -> bytes:
    """The last packet to a sender whose memory cannot be mapped."""
    return REFUSED + reason.encode()[:_MAX_REASON_BYTES]


def read_refused(body: bytes) -> str:
    """Why the memory cannot be mapped."""
    return body[:_MAX_REASON_BYTES].decode(errors="replace")


def forget(number: int) -> bytes:
    """The packet after which nothing is offered from this memory."""
    return FORGET + _FORGET.pack(number)


def read_forget(body: bytes) -> int:
    """The number of the memory. Raises `Malformed`."""
    (number,) = _fields(_FORGET, body)
    return int(number)


def _fields(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != layout.size:
        raise Malformed
    return layout.unpack(body)
