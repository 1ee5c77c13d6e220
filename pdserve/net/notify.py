"""Reports readiness to a supervisor through the sd_notify protocol of systemd, which `pdserve up` supports, too.

Source: sd_notify(3).
"""

from __future__ import annotations

import asyncio
import functools
import socket

from pdserve.base.config import variable

#: Pause before a supervisor that has no room for more messages is sent the same one again.
_RETRY_S = 0.5


def notify(state: str) -> bool:
    """Sends lines such as `READY=1` or `STATUS=loading` to $NOTIFY_SOCKET.

    Returns False when there is no listener, or it reads nothing: a supervisor that hangs must not hold up a process.
    """
    address = variable("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        _sender().sendto(state.encode(), socket.MSG_DONTWAIT, address)
    except OSError:
        return False
    return True


@functools.cache
def _sender() -> socket.socket:
    """The socket is kept open: a process without a free descriptor must still report its progress, or it is ended."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def has_listener() -> bool:
    """Whether a supervisor listens to this process."""
    return bool(variable("NOTIFY_SOCKET"))


def ready() -> bool:
    """Reports that this process serves from now on."""
    return notify("READY=1\nSTATUS=ready")


async def report_ready() -> None:
    """Reports readiness again and again until the supervisor, which waits for it, has received it."""
    while has_listener() and not ready():  # noqa: ASYNC110 - nothing says when it reads again
        await asyncio.sleep(_RETRY_S)


def alive() -> bool:
    """Reports that this process makes progress. A supervisor ends a process that stops reporting it."""
    return notify("WATCHDOG=1")


def stopping() -> bool:
    """Reports that this process drains."""
    return notify("STOPPING=1\nSTATUS=draining")


def status(text: str) -> bool:
    """Reports what the process is doing, in one line."""
    return notify(f"STATUS={text}")
