"""Matches arriving messages to posted receives by tag; what every transport does alike, free of I/O."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from kvtransfer.transport.base import Operation

M = TypeVar("M")

#: Messages that may wait for their receive; beyond, the oldest is dropped. Handovers post first: these are strays.
MAX_EARLY = 4096
#: Withdrawn tags that are remembered, so that their late messages are dropped at once.
MAX_WITHDRAWN = 1 << 16


class TagMatcher(Generic[M]):
    """Posted receives, early messages and withdrawn tags. `drop` gets each message that nobody will receive."""

    def __init__(
        self, drop: Callable[[M], None], *, max_early: int = MAX_EARLY, max_early_bytes: float = math.inf
    ) -> None:
        self._drop = drop
        self._max_early = max_early
        self._max_early_bytes = max_early_bytes
        self._posted: dict[int, Operation] = {}
        #: With their sizes in bytes.
        self._early: OrderedDict[int, tuple[M, int]] = OrderedDict()
        self._early_bytes = 0
        self._withdrawn: OrderedDict[int, None] = OrderedDict()

    @property
    def num_posted(self) -> int:
        """Receives that wait for their message."""
        return len(self._posted)

    def post(self, receive: Operation) -> M | None:
        """Offers a receive. A message that came early is handed back, to be received into it now."""
        if receive.tag in self._posted:
            raise ValueError(f"a receive of tag {receive.tag:#x} is outstanding")
        self._withdrawn.pop(receive.tag, None)
        if receive.tag in self._early:
            return self._take(receive.tag)
        self._posted[receive.tag] = receive
        return None

    def arrive(self, tag: int, message: M, num_bytes: int = 0) -> Operation | None:
        """The receive the message belongs to; None when it was dropped or waits for its receive.

        `num_bytes`: that it takes while it waits, of `max_early_bytes`.
        """
        receive = self._posted.pop(tag, None)
        if receive is not None:
            return receive
        if tag in self._withdrawn or tag in self._early or num_bytes > self._max_early_bytes:
            self._drop(message)
            return None
        self._early[tag] = message, num_bytes
        self._early_bytes += num_bytes
        while len(self._early) > self._max_early or self._early_bytes > self._max_early_bytes:
            self._drop(self._take(next(iter(self._early))))
        return None

    def withdraw(self, receive: Operation) -> bool:
        """Takes a receive back. False when it is not waiting (any more): matched, done or never posted."""
        if self._posted.get(receive.tag) is not receive:
            return False
        del self._posted[receive.tag]
        self._withdrawn[receive.tag] = None
        if len(self._withdrawn) > MAX_WITHDRAWN:
            self._withdrawn.popitem(last=False)
        return True

    def clear(self) -> tuple[list[Operation], list[M]]:
        """Empties it: the receives that were waiting, and the messages that were."""
        receives, messages = list(self._posted.values()), [self._take(tag) for tag in list(self._early)]
        self._posted.clear()
        self._withdrawn.clear()
        return receives, messages

    def _take(self, tag: int) -> M:
        message, num_bytes = self._early.pop(tag)
        self._early_bytes -= num_bytes
        return message
