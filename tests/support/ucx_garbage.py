"""What a stranger can send to a port of UCX: bytes that are no connection, and UCX's own protocol, right and wrong."""

from __future__ import annotations

import contextlib
import fcntl
import random
import socket
import struct

from tests.support.ucx_messages import CONNECT, MAGIC, connect_from, message, mutants, put

TIMEOUT_S = 20.0
_BYTES_UNACKNOWLEDGED = 0x5411
_NUM_SILENT = 32
_NUM_SHORT = 100
_NUM_MUTANTS = 144


def kinds() -> dict[str, bytes]:
    """What is sent on a connection, by name; the same in each run."""
    noise = random.Random(13)
    return {
        "random bytes": noise.randbytes(4096),
        "HTTP": b"GET / HTTP/1.1\r\n\r\n",
        "part of the first bytes": MAGIC[:5],
        "random bytes after the first ones": MAGIC + noise.randbytes(4096),
        "zeros after the first ones": MAGIC + bytes(4),
        "a request to connect, cut short": CONNECT[:-9],
        "a request to connect": CONNECT,
        "a request to connect from a port without a listener": connect_from(9),
        "a message longer than it says": CONNECT + message(1, noise.randbytes(64)) + noise.randbytes(512),
        "a message shorter than it says": CONNECT + struct.pack("<BI", 2, 1 << 30) + noise.randbytes(64),
        "a message of no known kind": CONNECT + message(31, noise.randbytes(64)),
        "bytes for an address that is not there": CONNECT + put(16, noise.randbytes(64)),
        "bytes before a request to connect": MAGIC + put(16, noise.randbytes(64)),
    }


def send_garbage(port: int, silent: contextlib.ExitStack, *, seed: int = 13) -> list[int]:
    """Sends every kind to a port of this host, and opens many connections: ended at once, cut, and silent ones.

    Silent ones stay open until `silent` closes, and so do those that send. Returns for each of those that sent how many
    bytes the other end's kernel has taken.
    """
    for _ in range(_NUM_SILENT):
        with contextlib.suppress(ConnectionError):
            silent.enter_context(_connection(port))
    senders = [(_sent(port, data, silent), len(data)) for data in (*kinds().values(), *mutants(seed, _NUM_MUTANTS))]
    for _ in range(_NUM_SHORT):
        # One that came at a bad moment is ended by a worker that starts again.
        with contextlib.suppress(ConnectionError), _connection(port) as connection:
            # Closing resets the connection.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return [num_bytes - _unacknowledged(connection) for connection, num_bytes in senders if connection is not None]


def _sent(port: int, data: bytes, silent: contextlib.ExitStack) -> socket.socket | None:
    """A connection on which this was sent; None: it ended, or its worker did, which is what we came for."""
    try:
        connection = silent.enter_context(_connection(port))
        connection.sendall(data)
    except ConnectionError:
        return None
    return connection


def _connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)


def _unacknowledged(connection: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(connection, _BYTES_UNACKNOWLEDGED, b"\0" * 4))[0])
