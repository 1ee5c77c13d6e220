"""What a stranger can send to a port of UCX: bytes that are no connection, and connections that go wrong."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

TIMEOUT_S = 20.0
#: The first bytes of every connection between two UCX over TCP.
_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
#: A message of UCX over TCP starts with its kind and its length; this kind opens a connection.
_OPENS = 32
_NUM_SILENT = 32
_NUM_SHORT = 100


def _message(kind: int, body: bytes) -> bytes:
    return struct.pack("<BI", kind, len(body)) + body


def _connect() -> bytes:
    """A request to connect that names a port on which nobody listens."""
    address = struct.pack("<H", socket.AF_INET) + struct.pack(">H", 9) + socket.inet_aton("127.0.0.1") + bytes(8)
    return _MAGIC + _message(_OPENS, struct.pack("<I", 1) + address + struct.pack("<Q", 7))


def kinds() -> dict[str, bytes]:
    """What is sent on a connection, by name; the same in each run."""
    noise = random.Random(13)
    connect = _connect()
    return {
        "random bytes": noise.randbytes(4096),
        "HTTP": b"GET / HTTP/1.1\r\n\r\n",
        "part of the first bytes": _MAGIC[:5],
        "random bytes after the first ones": _MAGIC + noise.randbytes(4096),
        "zeros after the first ones": _MAGIC + bytes(4),
        "a request to connect, cut short": connect[:-9],
        "a request to connect": connect,
        "a message longer than it says": connect + _message(1, noise.randbytes(64)) + noise.randbytes(512),
        "a message shorter than it says": connect + struct.pack("<BI", 2, 1 << 30) + noise.randbytes(64),
        "a message of no known kind": connect + _message(31, noise.randbytes(64)),
    }


def send_garbage(port: int, silent: contextlib.ExitStack) -> None:
    """Sends every kind to a port of this host, and opens many connections: ended at once, cut, and silent ones.

    Silent ones stay open until `silent` closes. A connection that UCX ends is what we came for.
    """
    for _ in range(_NUM_SILENT):
        silent.enter_context(_connection(port))
    for data in kinds().values():
        with _connection(port) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
    for _ in range(_NUM_SHORT):
        with _connection(port) as connection:
            # Closing resets the connection.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with _connection(port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(kinds()["random bytes"])
        # UCX has read what was sent before once it ends this one.
        while connection.recv(4096):
            pass


def _connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
