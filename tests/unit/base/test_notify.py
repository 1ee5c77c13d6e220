"""Messages to the supervisor: they need no free descriptor, and a missing listener is no error."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from pdserve.base import notify


def test_a_process_without_a_free_descriptor_still_reports_that_it_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by `pdserve chaos`: each message opened a socket, and the error ended the router."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        assert notify.ready()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            assert notify.alive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [listener.recv(100), listener.recv(100)] == [b"READY=1\nSTATUS=ready", b"WATCHDOG=1"]


def test_without_a_listener_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify.alive()
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    assert not notify.alive()
