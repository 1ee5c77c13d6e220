"""Records as bytes: compressed, and sealed to the key under which they are stored."""

from __future__ import annotations

import zlib

from pdserve.base.errors import TooLarge, Unreadable
from router_svc.records.stream_seal import StreamSeal
from router_svc.state.state_store import MAX_RECORD_BYTES

_RECORD_INDEX = 0
#: A record that is not compressed.
_MAX_BYTES = 8 * MAX_RECORD_BYTES


def sealed(data: bytes, key: str, seal: StreamSeal) -> bytes:
    """What to store of a record. Takes some milliseconds for a long one. Raises `TooLarge`."""
    if len(data) > _MAX_BYTES:
        raise TooLarge(f"The record has {len(data)} bytes, more than may be stored ({_MAX_BYTES}). Ask for less.")
    return seal.seal(zlib.compress(data, 1), key, _RECORD_INDEX)


def opened(stored: bytes, key: str, seal: StreamSeal) -> bytes:
    """The record of what is stored. Raises `Unreadable`."""
    try:
        return zlib.decompressobj().decompress(seal.open(stored, key, _RECORD_INDEX), _MAX_BYTES)
    except zlib.error as error:
        raise Unreadable(f"The stored record cannot be read: {error!r:.200}.") from error
