"""The receiving end of sd_notify."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pdserve.cli.supervisor.notify_socket import NotifySocket


async def test_what_is_pending_is_delivered_and_nothing_once_it_is_closed() -> None:
    """A watch for hanging processes may look at the moment at which the process is reaped."""
    got: list[Mapping[str, str]] = []
    notify = NotifySocket(got.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect("\0" + notify.address[1:])
        sender.send(b"READY=1\nSTATUS=loading")
    notify.drain()
    assert got == [{"READY": "1", "STATUS": "loading"}]
    notify.close()
    notify.drain()
    assert len(got) == 1
