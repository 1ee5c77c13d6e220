"""Connections of peers that are not known yet: how many there may be, and the memory they may hold together. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

#: Connections that may be open before they have shown who they are. A router's first message comes with the connection.
MAX_NEWCOMERS = 512


class Newcomer(Protocol):
    """What is needed of a connection."""

    def abort(self) -> None:
        """Closes it at once."""


class Newcomers:
    """Closes the oldest newcomers beyond the limits: a flood of connections that say nothing keeps none out that do."""

    def __init__(self, *, max_bytes: int, max_connections: int = MAX_NEWCOMERS) -> None:
        self._max_bytes = max_bytes
        self._max_connections = max_connections
        #: The bytes that each one holds, in the order of their arrival.
        self._held: OrderedDict[Newcomer, int] = OrderedDict()
        self._num_bytes = 0

    def add(self, newcomer: Newcomer) -> None:
        """A peer has connected."""
        self._held[newcomer] = 0
        self._close_beyond_limits()

    def hold(self, newcomer: Newcomer, num_bytes: int) -> None:
        """The connection holds this many bytes now. Does nothing for one that is not here."""
        if newcomer in self._held:
            self._num_bytes += num_bytes - self._held[newcomer]
            self._held[newcomer] = num_bytes
            self._close_beyond_limits()

    def remove(self, newcomer: Newcomer) -> None:
        """The peer is known, or gone."""
        self._num_bytes -= self._held.pop(newcomer, 0)

    def __len__(self) -> int:
        return len(self._held)

    def _close_beyond_limits(self) -> None:
        while len(self._held) > self._max_connections or self._num_bytes > self._max_bytes:
            oldest = next(iter(self._held))
            self.remove(oldest)
            oldest.abort()
