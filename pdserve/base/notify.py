"""Tells a supervisor about readiness through the sd_notify protocol: systemd's, and `pdserve up` speaks it too.

Source: sd_notify(3).
"""

from __future__ import annotations

import socket

from pdserve.base.config import variable


def notify(state: str) -> bool:
    """Sends lines such as `READY=1` or `STATUS=loading` to $NOTIFY_SOCKET; False when nobody listens."""
    address = variable("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(state.encode(), address)
        except OSError:
            return False
    return True


def ready() -> bool:
    """This process now serves."""
    return notify("READY=1\nSTATUS=ready")


def stopping() -> bool:
    """This process drains."""
    return notify("STOPPING=1\nSTATUS=draining")


def status(text: str) -> bool:
    """One line that says what the process is doing."""
    return notify(f"STATUS={text}")
