"""The order of waiting prompts: by priority, then fair between clients, then by arrival. Pure.

Each prompt gets a start tag in virtual time when it arrives: where its client's previous prompt ends, or now. From its
start to its end, it takes the number of its sequences, divided by the client's weight. Prompts are served in the order
of their start tags. So a client with many prompts waits behind its own, and others pass. Source: start-time fair
queueing, Goyal, Vin and Cheng 1996.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from router_svc.request.client import Client

#: Clients without a waiting prompt are forgotten when there are this many of them, and their time has passed.
_MAX_IDLE_CLIENTS = 256


@dataclass(slots=True, eq=False, kw_only=True)
class QueueSlot:
    """The slot of one prompt, first in the queue and then among the admitted."""

    sequences: int
    uncached_tokens: int
    client: Client
    #: Lower values come first.
    priority: int
    offered_at: float
    admitted_at: float | None = None
    #: When it would have been admitted if it had fewer sequences.
    blocked_at: float | None = None


@dataclass(slots=True)
class _Share:
    """What one client has in the queue."""

    num_waiting: int = 0
    #: Virtual time at which its last prompt ends.
    end: float = 0.0


#: Priority, start tag, and number of arrival, which makes it unique.
_Key = tuple[int, float, int]


class FairOrder:
    """The waiting prompts, in the order in which they should be admitted."""

    def __init__(self) -> None:
        self._order: list[tuple[_Key, QueueSlot]] = []
        self._keys: dict[QueueSlot, _Key] = {}
        self._shares: dict[str, _Share] = {}
        self._now = 0.0
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[QueueSlot]:
        """In order. Slots may be removed meanwhile."""
        return iter([slot for _, slot in self._order])

    def __contains__(self, slot: QueueSlot) -> bool:
        return slot in self._keys

    def add(self, slot: QueueSlot) -> None:
        """A prompt arrives."""
        share = self._shares.setdefault(slot.client.id, _Share())
        start = max(self._now, share.end)
        share.end = start + slot.sequences / slot.client.weight
        share.num_waiting += 1
        key = self._keys[slot] = (slot.priority, start, next(self._arrivals))
        bisect.insort(self._order, (key, slot), key=_key)
        if len(self._shares) > _MAX_IDLE_CLIENTS + len(self._order):
            self._shares = {
                client: share for client, share in self._shares.items() if share.num_waiting or share.end > self._now
            }

    def admit(self, slot: QueueSlot) -> None:
        """A prompt's turn has come."""
        self._now = max(self._now, self._keys[slot][1])
        self.remove(slot)

    def remove(self, slot: QueueSlot) -> None:
        """A prompt is no longer waiting."""
        key = self._keys.pop(slot)
        del self._order[bisect.bisect_left(self._order, key, key=_key)]
        self._shares[slot.client.id].num_waiting -= 1

    def num_waiting_of(self, client: Client) -> int:
        """Waiting prompts of one client."""
        share = self._shares.get(client.id)
        return share.num_waiting if share else 0

    def num_ahead(self, client: Client, priority: int, count: int) -> int:
        """How many waiting prompts will be admitted before the last of `count` more of this client, about."""
        turns = (self.num_waiting_of(client) + count) / client.weight
        ahead: dict[str, int] = {}
        for slot in self:
            limit = turns * slot.client.weight if slot.client.id != client.id else len(self)
            if slot.priority < priority or (slot.priority == priority and ahead.get(slot.client.id, 0) < limit):
                ahead[slot.client.id] = ahead.get(slot.client.id, 0) + 1
        return sum(ahead.values())

    def displaceable(self, client: Client, priority: int, count: int, needed: int) -> list[QueueSlot]:
        """Prompts that should give up their slots for `count` more of this client; fewer than `needed` if too few.

        They are the last ones of clients that, without them, still hold no fewer slots for their weight than this one.
        """
        own = (self.num_waiting_of(client) + count) / client.weight
        left = {slot.client.id: self.num_waiting_of(slot.client) for slot in self}
        victims: list[QueueSlot] = []
        for slot in reversed(list(self)):
            if len(victims) == needed:
                break
            others = (left[slot.client.id] - 1) / slot.client.weight
            if slot.client.id != client.id and slot.priority >= priority and others >= own:
                left[slot.client.id] -= 1
                victims.append(slot)
        return victims


def _key(entry: tuple[_Key, QueueSlot]) -> _Key:
    return entry[0]
