"""What two processes say to each other over a Unix socket of packets. Pure.

sender                           receiver
HELLO token, count          ->
MEMORY id, size, descriptor ->                  maps the memory
                            <-   WELCOME        when the first `count` memories are mapped
OFFER (tag, id, from, size) ->                  copies each message into the buffer of its receive
                            <-   TAKEN tags     the sender may use the messages' memory again
FORGET id                   ->                  unmaps the memory
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

#: First byte of each packet.
HELLO, WELCOME, MEMORY, OFFER, TAKEN, FORGET = b"H", b"W", b"M", b"O", b"T", b"F"
TOKEN_BYTES = 32
#: Offers and tags of one packet: with them it has less than a socket's buffer holds.
MAX_RECORDS = 1024

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
_OFFER = struct.Struct("<QIQQ")
_TAG = struct.Struct("<Q")
_MEMORY = struct.Struct("<IQ")
_FORGET = struct.Struct("<I")
MAX_PACKET_BYTES = 1 + MAX_RECORDS * _OFFER.size


class Malformed(Exception):
    """A packet that no process of this version sends."""


def hello(token: bytes, num_memories: int) -> bytes:
    """The first packet, which that many memories follow."""
    return HELLO + _HELLO.pack(token, num_memories)


def read_hello(body: bytes) -> tuple[bytes, int]:
    """Token and number of memories. Raises `Malformed`."""
    token, num_memories = _fields(_HELLO, body)
    return token, num_memories


class Offer(NamedTuple):
    """A message that waits in memory of the sender."""

    tag: int
    memory: int
    start: int
    num_bytes: int


def offers(given: Sequence[Offer]) -> Iterator[bytes]:
    """The packets with these offers."""
    for first in range(0, len(given), MAX_RECORDS):
        yield OFFER + b"".join(_OFFER.pack(*each) for each in given[first : first + MAX_RECORDS])


def read_offers(body: bytes) -> Iterable[Offer]:
    """The offers of a packet. Raises `Malformed`."""
    return map(Offer._make, _records(_OFFER, body))


def taken(tags: Sequence[int]) -> Iterator[bytes]:
    """The packets with these tags."""
    for first in range(0, len(tags), MAX_RECORDS):
        yield TAKEN + b"".join(map(_TAG.pack, tags[first : first + MAX_RECORDS]))


def read_taken(body: bytes) -> Iterable[int]:
    """The tags of a packet. Raises `Malformed`."""
    return (tag for (tag,) in _records(_TAG, body))


def memory(number: int, num_bytes: int) -> bytes:
    """The packet that comes with a descriptor of `num_bytes` of memory."""
    return MEMORY + _MEMORY.pack(number, num_bytes)


def read_memory(body: bytes) -> tuple[int, int]:
    """Number and size in bytes. Raises `Malformed`."""
    number, num_bytes = _fields(_MEMORY, body)
    return number, num_bytes


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


def _records(layout: struct.Struct, body: bytes) -> Iterator[tuple[Any, ...]]:
    if len(body) % layout.size:
        raise Malformed
    return layout.iter_unpack(body)
