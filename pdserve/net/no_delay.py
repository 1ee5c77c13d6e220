"""TCP without waiting: a small message leaves before the one ahead of it is acknowledged."""

from __future__ import annotations

import socket


def send_at_once(connection: socket.socket) -> None:
    """Has the kernel send each message without waiting for the acknowledgement of the one before.

    asyncio does so only for sockets that know their protocol, which accepted ones do not.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
