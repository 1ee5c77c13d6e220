"""The kernel's list of TCP sockets."""

from __future__ import annotations

import socket
import sys

import pytest

from kvtransfer.transport.own_sockets import Connection, own_connections, remotes_in, tcp_sockets

LINES = (
    "   0: 0100007F:4C90 0200007F:9C40 02 00000000:00000000 00:00000000 00000000     0        0 101 1 0 20 4 30 10 -1",
    "   1: 0100007F:4C91 0300007F:9C40 02 00000000:00000000 00:00000000 00000000     0        0 102 1 0 20 4 30 10 -1",
    "   2: 00000000000000000000000001000000:0050 00000000000000000000000001000000:0051 02 0:0 0:0 0 0 0 103 1 0",
)


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes addresses in the order of the machine")
def test_the_other_ends_of_connections_that_are_being_made_are_read_from_the_kernels_table() -> None:
    assert dict(remotes_in(LINES, {101, 103, 104})) == {101: "127.0.0.2:40000", 103: "[::1]:81"}


def test_a_connection_that_is_being_made_is_listed_with_its_other_end() -> None:
    """A listener with a full backlog does not answer. Fails if only the socket itself is asked."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        assert {each.fd for each in tcp_sockets().values() if each.remote == target} == {
            first.fileno(),
            second.fileno(),
        }


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
