"""Connections of peers that are not known yet: how many are read at a time, and how many there may be. Pure.

A message of the largest size has to be received before its seal can be checked. So bytes cannot tell a router from a
stranger, and closing connections for their bytes closes those of routers. Instead a connection is read in its turn.
The others wait in the kernel, with a window's worth of bytes, so a burst of long prompts is served a little later.
A router sends its first message at once, so its turn takes milliseconds. A stranger can hold one only for seconds
while others wait, and hosts take turns equally: one host's strangers delay the requests of another by little.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

#: Connections that may be open before they have shown who they are. A router's first message comes with the connection.
MAX_NEWCOMERS = 1024
#: While others wait, a turn ends after this time without a byte, and after this time in all.
QUIET_S, TURN_S = 1.0, 5.0
#: Interval of `sweep`.
SWEEP_S = 0.25


class Newcomer(Protocol):
    """What is needed of a connection."""

    def begin_turn(self) -> None:
        """It is read from now on."""

    def abort(self) -> None:
        """Closes it at once."""


@dataclass(slots=True)
class _Turn:
    host: str
    started_at: float
    heard_at: float


class Newcomers:
    """Gives turns. `now` is any monotonic clock."""

    def __init__(self, *, max_turns: int, max_connections: int = MAX_NEWCOMERS) -> None:
        """`max_turns`: connections that are read at a time. Beyond `max_connections`, old ones are closed."""
        self._max_turns = max_turns
        self._max_connections = max_connections
        #: All newcomers, with their hosts, in the order of their arrival.
        self._hosts: dict[Newcomer, str] = {}
        self._num_at: Counter[str] = Counter()
        self._turns: dict[Newcomer, _Turn] = {}
        #: Newcomers that wait for their turn, by host, in the order of their arrival.
        self._waiting: dict[str, dict[Newcomer, None]] = {}
        self._swept_at = 0.0
        self._is_giving = False

    def add(self, newcomer: Newcomer, host: str, now: float) -> None:
        """A peer has connected from this host. Its turn begins at once, or later."""
        self._hosts[newcomer] = host
        self._num_at[host] += 1
        self._waiting.setdefault(host, {})[newcomer] = None
        if len(self._hosts) > self._max_connections:
            crowd = max(self._num_at, key=self._num_at.__getitem__)
            self._abort(next(each for each, host in self._hosts.items() if host == crowd))
        self._give_turns(now)

    def heard(self, newcomer: Newcomer, now: float) -> None:
        """The newcomer has sent bytes. Does nothing for a connection that has no turn."""
        if (turn := self._turns.get(newcomer)) is not None:
            turn.heard_at = now

    def remove(self, newcomer: Newcomer, now: float) -> None:
        """The peer is known, or gone. Does nothing for a connection that is no newcomer."""
        self._forget(newcomer)
        self._give_turns(now)

    def sweep(self, now: float) -> None:
        """Ends turns that take too long while others wait. Call it every `SWEEP_S`."""
        was_stopped, self._swept_at = now - self._swept_at > 2 * SWEEP_S, now
        # Bytes that arrived while this process itself was stopped are read before the next sweep.
        if not self._waiting or was_stopped:
            return
        for newcomer, turn in list(self._turns.items()):
            if now - turn.heard_at >= QUIET_S or now - turn.started_at >= TURN_S:
                self._abort(newcomer)
                self._give_turns(now)

    def __len__(self) -> int:
        return len(self._hosts)

    def _give_turns(self, now: float) -> None:
        # A newcomer that ends as its turn begins comes here again: this loop goes on with the next one.
        if self._is_giving:
            return
        self._is_giving = True
        try:
            while self._waiting and len(self._turns) < self._max_turns:
                host = self._next_host()
                # The latest newcomer is next: a crowd of strangers at a router's own host must not delay the router.
                newcomer = next(reversed(self._waiting[host]))
                self._leave(host, newcomer)
                self._turns[newcomer] = _Turn(host, now, now)
                newcomer.begin_turn()
        finally:
            self._is_giving = False

    def _next_host(self) -> str:
        """The waiting host with the fewest turns."""
        if len(self._waiting) == 1:
            return next(iter(self._waiting))
        counts = dict.fromkeys(self._waiting, 0)
        for turn in self._turns.values():
            if turn.host in counts:
                counts[turn.host] += 1
        return min(counts, key=counts.__getitem__)

    def _leave(self, host: str, newcomer: Newcomer) -> None:
        """The newcomer waits no longer."""
        waiting = self._waiting.get(host, {})
        waiting.pop(newcomer, None)
        if not waiting:
            self._waiting.pop(host, None)

    def _forget(self, newcomer: Newcomer) -> None:
        host = self._hosts.pop(newcomer, None)
        if host is None:
            return
        self._num_at[host] -= 1
        if not self._num_at[host]:
            del self._num_at[host]
        if self._turns.pop(newcomer, None) is None:
            self._leave(host, newcomer)

    def _abort(self, newcomer: Newcomer) -> None:
        self._forget(newcomer)
        newcomer.abort()


def host_of(address: str) -> str:
    """What counts as one host: an IPv4 address, or the network of an IPv6 address, of which a host has many."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed.packed[:8] + bytes(8), 64)))
    return str(parsed)
