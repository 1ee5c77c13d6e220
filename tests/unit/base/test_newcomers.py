"""Limits on connections of peers that are not known yet."""

from __future__ import annotations

from pdserve.base.newcomers import Newcomers


class Connection:
    def __init__(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        self.is_open = False


def test_beyond_the_number_of_newcomers_the_oldest_is_closed() -> None:
    newcomers = Newcomers(max_bytes=100, max_connections=3)
    connections = [Connection() for _ in range(5)]
    for each in connections:
        newcomers.add(each)
    assert [each.is_open for each in connections] == [False, False, True, True, True]


def test_beyond_their_bytes_the_oldest_is_closed() -> None:
    newcomers = Newcomers(max_bytes=100)
    first, second = Connection(), Connection()
    newcomers.add(first)
    newcomers.add(second)
    newcomers.hold(first, 60)
    newcomers.hold(second, 40)
    newcomers.hold(second, 30)
    assert first.is_open
    newcomers.hold(second, 41)
    assert (first.is_open, second.is_open) == (False, True)


def test_a_known_peer_counts_no_more_whatever_it_sends() -> None:
    newcomers = Newcomers(max_bytes=100, max_connections=1)
    friend, stranger = Connection(), Connection()
    newcomers.add(friend)
    newcomers.hold(friend, 90)
    newcomers.remove(friend)
    newcomers.add(stranger)
    newcomers.hold(friend, 1000)
    newcomers.hold(stranger, 100)
    assert friend.is_open
    assert stranger.is_open
    assert len(newcomers) == 1
