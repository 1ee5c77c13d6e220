"""Free ports of this machine for routers that are started by a program."""

from __future__ import annotations

import contextlib
import random
import socket

from pdserve.base.errors import SetupError

#: Below the ports that the kernel gives to connections: a router that is restarted finds its own port free.
_PORTS = range(20_000, 32_700)


def free_ports(count: int) -> list[int]:
    """Different free ports. Raises `SetupError` when there are too few."""
    found: list[int] = []
    with contextlib.ExitStack() as sockets:
        for port in random.SystemRandom().sample(_PORTS, k=min(len(_PORTS), 50 * count)):
            try:
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise SetupError(f"Found {len(found)} free ports between {_PORTS.start} and {_PORTS.stop}, and {count} are needed.")
