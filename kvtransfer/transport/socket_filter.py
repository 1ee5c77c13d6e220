"""A filter of the kernel on a TCP socket: segments with data are dropped before the process can read them.

Connections are made and ended as before, and data is sent again by its sender until the filter is gone. The sockets
are those of a library in this process, which knows nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

from kvtransfer.transport.own_sockets import TcpSocket, duplicate
from pdserve.base.errors import SetupError
from pdserve.peers.tcp_filter import SO_ATTACH_FILTER, SO_DETACH_FILTER

#: A classic BPF program. It sees a segment from its TCP header on, and keeps the segment if nothing follows the header.
_PROGRAM = (
    (0x80, 0, 0, 0),  # A = length of the segment
    (0x02, 0, 0, 0),  # M[0] = A
    (0x30, 0, 0, 12),  # A = the byte whose upper half is the header's length in words
    (0x74, 0, 0, 4),  # A >>= 4
    (0x64, 0, 0, 2),  # A <<= 2
    (0x07, 0, 0, 0),  # X = A
    (0x60, 0, 0, 0),  # A = M[0]
    (0x1D, 0, 1, 0),  # if A != X: skip one
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
    (0x06, 0, 0, 0),  # drop
)
_INSTRUCTIONS = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in _PROGRAM))
#: `struct sock_fprog`
_FILTER = struct.pack("@HP", len(_PROGRAM), ctypes.addressof(_INSTRUCTIONS))
_READ_AT_ONCE = 1 << 16


def shut(each: TcpSocket) -> None:
    """Drops whatever data comes to this socket, or waits in it. Connections inherit that from a listening socket.

    Raises: SetupError when the kernel refuses it, which `pdserve.peers.tcp_filter.filter_refusal` finds out before.
    """
    with _handle(each) as handle:
        if handle is None:
            return
        try:
            handle.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, _FILTER)
        except OSError as error:
            raise SetupError(
                f"The kernel refuses filters on TCP sockets ({error}), which keep strangers from UCX. Use "
                "--guard-transport off, and let only workers reach its ports."
            ) from error
        if each.listens:
            _refuse_waiting(handle)
        else:
            _discard(handle)


def _refuse_waiting(listener: socket.socket) -> None:
    """Ends connections that came before the filter: they have none. UCX's listening sockets do not block."""
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def _discard(connection: socket.socket) -> None:
    """Takes what came before the filter out of the socket. UCX reads only when it is polled, which it was not yet."""
    with contextlib.suppress(OSError):
        while connection.recv(_READ_AT_ONCE, socket.MSG_DONTWAIT):
            pass


def open_to_data(each: TcpSocket) -> None:
    """Lets data in again."""
    with _handle(each) as handle, contextlib.suppress(OSError):
        if handle is not None:
            handle.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def end(each: TcpSocket) -> None:
    """Ends a connection, as its other end could: the library reads the end of it, and closes it."""
    with _handle(each) as handle, contextlib.suppress(OSError):
        if handle is not None:
            handle.shutdown(socket.SHUT_RDWR)


def is_shut(each: TcpSocket) -> bool:
    """Whether data is dropped."""
    with _handle(each) as handle:
        if handle is None:
            return False
        try:
            # The kernel answers with the number of instructions, as the length of the answer.
            found = handle.getsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, 1024)
        except OSError:
            return False
    return len(found) == len(_PROGRAM)


@contextlib.contextmanager
def _handle(of: TcpSocket) -> Iterator[socket.socket | None]:
    """The socket for as long as the block runs; None: it was closed meanwhile."""
    try:
        handle = duplicate(of.fd)
    except OSError:
        yield None
        return
    with handle:
        yield handle if os.fstat(handle.fileno()).st_ino == of.inode else None
