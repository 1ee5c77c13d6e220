"""Reports readiness to a supervisor through the sd_notify protocol of systemd, which `pdserve up` supports, too.

Source: sd_notify(3).
"""

from __future__ import annotations

import functools
import socket

from pdserve.base.config import variable


def notify(state: str) -> bool:
    """Sends lines such as `READY=1` or `STATUS=loading` to $NOTIFY_SOCKET. False when there is no listener."""
    address = variable("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        _sender().sendto(state.encode(), address)
    except OSError:
        return False
    return True


@functools.cache
def _sender() -> socket.socket:
    """Kept open: a process without a free descriptor must still report that it makes progress, or it would be ended."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def has_listener() -> bool:
    """Whether a supervisor listens to this process."""
    return bool(variable("NOTIFY_SOCKET"))


def ready() -> bool:
    """Reports that this process serves from now on."""
    return notify("READY=1\nSTATUS=ready")


def alive() -> bool:
    """Reports that this process makes progress. A supervisor ends one that has reported it and stops to do so."""
    return notify("WATCHDOG=1")


def stopping() -> bool:
    """Reports that this process drains."""
    return notify("STOPPING=1\nSTATUS=draining")


def status(text: str) -> bool:
    """Reports what the process is doing, in one line."""
    return notify(f"STATUS={text}")
