"""Messages to the supervisor: they need no free descriptor, and a missing listener is no error."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from itertools import takewhile
from pathlib import Path

import pytest

from pdserve.net import notify


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


async def test_a_supervisor_that_reads_nothing_delays_no_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a stopped `pdserve up`: after ten signs of life its router and workers stood still, too.

    That a process is ready arrives all the same, once the supervisor reads again.
    """
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setattr(notify, "_RETRY_S", 0.0)
        assert sum(takewhile(bool, (notify.alive() for _ in range(100_000)))) < 100_000
        reporting = asyncio.create_task(notify.report_ready())
        await asyncio.sleep(0)
        assert not reporting.done()
        messages = {listener.recv(100)}
        await reporting
        while b"READY=1\nSTATUS=ready" not in messages:
            messages.add(listener.recv(100))
