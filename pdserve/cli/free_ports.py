"""Free ports of this machine for servers that are started by a program."""

from __future__ import annotations

import contextlib
import random
import socket

from pdserve.base.errors import SetupError

#: Below the ports that the kernel gives to connections: none of them takes a port before its server listens, and a
#: server that is restarted finds its own port free.
_PORTS = range(20_000, 32_700)
#: Ports that are tried for each one that is wanted: choosing among all of them would take 30 ms.
_TRIES = 50
#: Not the generator that callers seed.
_RANDOM = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Different free ports. Raises `SetupError` when there are too few."""
    found: list[int] = []
    with contextlib.ExitStack() as sockets:
        for port in _RANDOM.sample(_PORTS, k=min(len(_PORTS), _TRIES * count)):
            if _is_bound(sockets, port):
                found.append(port)
            if len(found) == count:
                return found
    raise SetupError(f"Found {len(found)} free ports between {_PORTS.start} and {_PORTS.stop}, and {count} are needed.")


def free_port(*offsets: int) -> int:
    """A free port; those at these offsets above it are free, too. Raises `SetupError` when there is none."""
    ports = range(_PORTS.start, _PORTS.stop - max(offsets, default=0))
    for port in _RANDOM.sample(ports, k=min(len(ports), _TRIES)):
        with contextlib.ExitStack() as sockets:
            if all(_is_bound(sockets, port + offset) for offset in (0, *offsets)):
                return port
    raise SetupError(f"Found no free port between {_PORTS.start} and {_PORTS.stop}.")


def _is_bound(sockets: contextlib.ExitStack, port: int) -> bool:
    """Binds a socket to the port; False if it is taken."""
    try:
        sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
