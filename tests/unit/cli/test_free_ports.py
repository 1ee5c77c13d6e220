"""Ports for servers that a program starts."""

from __future__ import annotations

import socket

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli import free_ports


def test_a_port_is_free_and_so_are_those_that_its_server_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    base = free_ports.free_port(*range(1, 5))
    monkeypatch.setattr(free_ports, "_PORTS", range(base, base + 4))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 1))
        assert free_ports.free_port(1) == base + 2
        assert sorted(free_ports.free_ports(3)) == [base, base + 2, base + 3]
        with pytest.raises(SetupError, match=f"between {base} and {base + 4}"):
            free_ports.free_port(1, 2)
        with pytest.raises(SetupError, match="Found 3 free ports"):
            free_ports.free_ports(4)
