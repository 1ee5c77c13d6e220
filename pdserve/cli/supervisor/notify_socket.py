"""The receiving end of the sd_notify protocol, for one incarnation of a process.

Source: sd_notify(3).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping

_MAX_MESSAGE_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class NotifySocket:
    """Calls `on_message` with the variables of each datagram that arrives.

    The address is random and abstract, so a crash leaves nothing to clean up. Any user of the machine can send to it:
    datagrams from other users are dropped.
    """

    def __init__(self, on_message: Callable[[Mapping[str, str]], None]) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        name = f"pdserve-notify-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + name)
        #: Value of the child's NOTIFY_SOCKET.
        self.address = "@" + name
        self._loop.add_reader(self._socket, self.drain)

    def drain(self) -> None:
        """Delivers all pending datagrams; a process's last ones may still be here when its death is noticed.

        Does nothing once it is closed.
        """
        while self._socket.fileno() >= 0:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            if _sender_uid(ancillary) == os.getuid():
                self._on_message(parse_message(data))

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self._loop.remove_reader(self._socket)
        self._socket.close()


def parse_message(data: bytes) -> dict[str, str]:
    """Parses the NAME=VALUE lines of a datagram; other lines are ignored."""
    lines = data.decode("utf-8", errors="replace").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, equals, value in pairs if equals}


def _sender_uid(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return int(_CREDENTIALS.unpack(data)[1])
    return None
