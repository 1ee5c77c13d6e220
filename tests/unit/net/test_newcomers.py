"""Limits on connections of peers that are not known yet."""

from __future__ import annotations

import pytest

from pdserve.net.newcomers import QUIET_S, SWEEP_S, TURN_S, Newcomers, host_of


class Connection:
    def __init__(self) -> None:
        self.is_open = True
        self.has_turn = False

    def begin_turn(self) -> None:
        self.has_turn = True

    def abort(self) -> None:
        self.is_open = False


def arrive(newcomers: Newcomers, count: int, host: str = "router", now: float = 0.0) -> list[Connection]:
    connections = [Connection() for _ in range(count)]
    for each in connections:
        newcomers.add(each, host, now)
    return connections


def turns(connections: list[Connection]) -> list[int]:
    return [index for index, each in enumerate(connections) if each.has_turn]


def sweep(newcomers: Newcomers, start: float, end: float) -> None:
    for step in range(round((end - start) / SWEEP_S) + 1):
        newcomers.sweep(start + step * SWEEP_S)


def test_beyond_the_number_of_newcomers_the_oldest_is_closed() -> None:
    newcomers = Newcomers(max_turns=9, max_connections=3)
    connections = arrive(newcomers, 5)
    assert [each.is_open for each in connections] == [False, False, True, True, True]
    assert len(newcomers) == 3


def test_beyond_the_number_the_host_with_the_largest_one_loses_connections() -> None:
    newcomers = Newcomers(max_turns=2, max_connections=4)
    [friend] = arrive(newcomers, 1, "router")
    strangers = arrive(newcomers, 5, "stranger")
    assert friend.is_open
    assert [each.is_open for each in strangers] == [False, False, True, True, True]


def test_newcomers_beyond_the_turns_wait_until_one_is_known() -> None:
    newcomers = Newcomers(max_turns=2)
    connections = arrive(newcomers, 5)
    assert turns(connections) == [0, 1]
    newcomers.remove(connections[0], 1.0)
    assert turns(connections) == [0, 1, 4]
    for index in (1, 4, 3):
        newcomers.remove(connections[index], 2.0)
    assert turns(connections) == [0, 1, 2, 3, 4]
    assert all(each.is_open for each in connections)
    newcomers.remove(connections[2], 3.0)
    assert len(newcomers) == 0


def test_one_that_leaves_while_it_waits_gets_no_turn() -> None:
    newcomers = Newcomers(max_turns=1)
    first, second, third = arrive(newcomers, 3)
    newcomers.remove(third, 1.0)
    newcomers.remove(first, 1.0)
    assert (second.has_turn, third.has_turn, len(newcomers)) == (True, False, 1)


def test_silent_turns_end_while_others_wait_and_no_sooner() -> None:
    newcomers = Newcomers(max_turns=2)
    silent, slow = arrive(newcomers, 2)
    sweep(newcomers, 0.0, 60.0)
    assert silent.is_open, "no one else needs the turn"
    newcomers.heard(slow, 60.0)
    [waiting] = arrive(newcomers, 1, now=60.0)
    newcomers.sweep(60.0 + SWEEP_S)
    assert (silent.is_open, waiting.has_turn) == (False, True)
    # Slowly is not silent, but does not last either.
    slow, waiting = arrive(newcomers := Newcomers(max_turns=1), 2)
    for step in range(round(TURN_S / SWEEP_S)):
        newcomers.sweep(step * SWEEP_S)
        newcomers.heard(slow, step * SWEEP_S)
    assert (slow.is_open, waiting.has_turn) == (True, False)
    newcomers.sweep(TURN_S)
    assert (slow.is_open, waiting.has_turn) == (False, True)


def test_a_pause_of_this_process_ends_no_turn() -> None:
    newcomers = Newcomers(max_turns=1)
    newcomers.sweep(0.0)
    reading, waiting = arrive(newcomers, 2)
    newcomers.sweep(3 * QUIET_S)
    assert reading.is_open
    newcomers.heard(reading, 3 * QUIET_S)
    newcomers.sweep(3 * QUIET_S + SWEEP_S)
    assert (reading.is_open, waiting.has_turn) == (True, False)


def test_hosts_take_turns_equally_however_many_connections_one_opens() -> None:
    newcomers = Newcomers(max_turns=4)
    strangers = arrive(newcomers, 100, "stranger")
    friends = arrive(newcomers, 3, "router")
    assert turns(strangers) == [0, 1, 2, 3]
    for gone in strangers[:2]:
        newcomers.remove(gone, 1.0)
    assert turns(friends) == [1, 2]
    assert turns(strangers) == [0, 1, 2, 3]


def test_the_latest_of_a_host_is_the_first_to_get_a_turn() -> None:
    """A crowd of strangers at the router's own host does not stand in front of it."""
    newcomers = Newcomers(max_turns=2)
    strangers = arrive(newcomers, 100)
    [friend] = arrive(newcomers, 1, now=QUIET_S)
    newcomers.sweep(QUIET_S)
    assert not friend.has_turn, "the first sweep may follow a pause"
    newcomers.sweep(QUIET_S + SWEEP_S)
    assert friend.has_turn
    assert [each.is_open for each in strangers[:3]] == [False, False, True]


def test_newcomers_that_end_as_their_turns_begin_take_no_stack() -> None:
    """A server that stops closes each one as its turn begins."""

    class Ending(Connection):
        def begin_turn(self) -> None:
            super().begin_turn()
            newcomers.remove(self, 1.0)

    newcomers = Newcomers(max_turns=1, max_connections=3000)
    [first] = arrive(newcomers, 1)
    for _ in range(2500):
        newcomers.add(Ending(), "router", 0.0)
    newcomers.remove(first, 1.0)
    assert len(newcomers) == 0


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2::7", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
    ],
)
def test_a_host_is_an_address_or_the_network_of_an_ipv6_one(address: str, host: str) -> None:
    assert host_of(address) == host
