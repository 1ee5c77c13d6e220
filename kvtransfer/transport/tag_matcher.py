"""Matching of arriving messages to posted receives by tag, which all transports share. Does no I/O."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from kvtransfer.transport.base import Operation

M = TypeVar("M")

#: Messages that may wait for their receive; then the oldest is dropped. Handovers post first, so these are strays.
MAX_EARLY = 4096
#: Withdrawn tags that are remembered, to drop their late messages at once.
MAX_WITHDRAWN = 1 << 16


class TagMatcher(Generic[M]):
    """Posted receives, early messages and withdrawn tags. `drop` is called with each message that is not received."""

    def __init__(
        self, drop: Callable[[M], None], *, max_early: int = MAX_EARLY, max_early_bytes: float = math.inf
    ) -> None:
        self._drop = drop
        self._max_early = max_early
        self._max_early_bytes = max_early_bytes
        self._posted: dict[int, Operation] = {}
        #: Messages that wait for their receives, by tag, with their sizes in bytes.
        self._early: OrderedDict[int, tuple[M, int]] = OrderedDict()
        self._early_bytes = 0
        self._withdrawn: OrderedDict[int, None] = OrderedDict()

    @property
    def num_posted(self) -> int:
        """Number of receives that wait for their message."""
        return len(self._posted)

    def post(self, receive: Operation) -> M | None:
        """Adds a receive. Returns the message if it came early: the caller receives it now."""
        if receive.tag in self._posted:
            raise ValueError(f"A receive of tag {receive.tag:#x} is outstanding already.")
        self._withdrawn.pop(receive.tag, None)
        if receive.tag in self._early:
            return self._take(receive.tag)
        self._posted[receive.tag] = receive
        return None

    def arrive(self, tag: int, message: M, num_bytes: int = 0) -> Operation | None:
        """The receive that the message belongs to; None when it was dropped or waits for its receive.

        `num_bytes`: its share of `max_early_bytes` while it waits.
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
        """Removes a receive. False when it does not wait: it was matched, is done, or was never posted."""
        if self._posted.get(receive.tag) is not receive:
            return False
        del self._posted[receive.tag]
        self._withdrawn[receive.tag] = None
        if len(self._withdrawn) > MAX_WITHDRAWN:
            self._withdrawn.popitem(last=False)
        return True

    def drop_early(self, is_gone: Callable[[M], bool]) -> None:
        """Removes waiting messages whose sender is gone."""
        for tag in [tag for tag, (message, _) in self._early.items() if is_gone(message)]:
            self._take(tag)

    def clear(self) -> tuple[list[Operation], list[M]]:
        """Removes and returns all waiting receives and all early messages."""
        receives, messages = list(self._posted.values()), [self._take(tag) for tag in list(self._early)]
        self._posted.clear()
        self._withdrawn.clear()
        return receives, messages

    def _take(self, tag: int) -> M:
        message, num_bytes = self._early.pop(tag)
        self._early_bytes -= num_bytes
        return message
