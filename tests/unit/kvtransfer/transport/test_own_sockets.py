"""The kernel's list of TCP sockets."""

from __future__ import annotations

import socket
import sys

import pytest

from kvtransfer.transport.own_sockets import Connection, own_connections, parse_table, tcp_sockets

LINES = (
    "   0: 0100007F:4C90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 101 1 0 100 0 0 10 0",
    "   1: 0100007F:4C90 0200007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 102 1 0 20 4 30 10 -1",
    "   2: 0100007F:4C90 0300007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 103 1 0 20 4 30 10 -1",
    "   3: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 104 1 0 1",
)


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes addresses in the order of the machine")
def test_lines_of_own_sockets_are_read_and_others_left_out() -> None:
    listener, connection, wide = parse_table(LINES, {101: 7, 102: 8, 104: 9})
    assert (listener.fd, listener.local, listener.listens) == (7, "127.0.0.1:19600", True)
    assert (connection.local, connection.remote, connection.listens) == ("127.0.0.1:19600", "127.0.0.2:40000", False)
    assert (wide.fd, wide.local, wide.listens) == (9, "[::1]:80", True)


def test_a_connection_is_known_at_the_end_that_opened_it() -> None:
    """Fails if an end is compared without the other: ports are shared by connections to different addresses."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            source, target = (f"127.0.0.1:{each.getsockname()[1]}" for each in (client, server))
            opened = Connection(source, target)
            assert own_connections([opened, Connection(source, "127.0.0.1:9")]) == [opened]
            listed = tcp_sockets()
            assert [each.fd for each in listed.values() if each.listens and each.local == target] == [server.fileno()]
            assert {each.fd for each in listed.values() if each.remote == target} == {client.fileno()}
    assert own_connections([opened]) == []
