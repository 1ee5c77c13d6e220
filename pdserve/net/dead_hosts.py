"""Has the kernel notice a peer whose host is dead or cut off."""

from __future__ import annotations

import socket
import sys

#: Delay of the first and interval of further keepalive probes. A single lost reply does not count.
_PROBE_AFTER_S, _PROBE_INTERVAL_S = 5, 2


def notice_dead_hosts(connection: socket.socket, lost_after_s: int) -> None:
    """Has the kernel probe a silent peer, and give up on one that acknowledges nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_s * 1000)
