"""Messages in a stream of bytes: each follows its length. Pure."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct(">I")


def framed(message: bytes) -> bytes:
    """The message behind its length: 4 bytes, big-endian."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Bytes that were received, and not taken as messages yet."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: maximum size of one message."""
        self._max_bytes = max_bytes
        self._received = bytearray()
        #: Whether a complete message is left, because `take` was called for fewer.
        self.has_more = False

    def add(self, data: bytes) -> None:
        """Takes bytes, which may hold several messages or a fraction of one."""
        self._received += data

    def take(self, count: int) -> list[bytes]:
        """At most `count` of the complete messages, in order; a flood of tiny ones is left for later calls.

        Raises: ValueError for a message that is too large.
        """
        received, start, messages = self._received, 0, list[bytes]()
        self.has_more = False
        while len(received) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            (length,) = _LENGTH.unpack_from(received, start)
            if length > self._max_bytes:
                raise ValueError(f"A message of {length} bytes was announced (limit {self._max_bytes}).")
            if len(received) - body < length:
                break
            if len(messages) >= count:
                self.has_more = True
                break
            start = body + length
            messages.append(bytes(received[body:start]))
        del received[:start]
        return messages

    def __len__(self) -> int:
        return len(self._received)

    def clear(self) -> None:
        """Drops everything."""
        self._received.clear()
        self.has_more = False
