"""Matching of arriving messages to posted receives by tag, which all transports share. Does no I/O."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from kvtransfer.transport.base import Inbox, Operation, tag_base_of
from pdserve.base.errors import PdserveError

M = TypeVar("M")

#: Messages without an inbox that may wait for their receive; then the oldest is dropped. They are strays.
MAX_EARLY = 4096
#: Withdrawn tags and closed inboxes that are remembered, to drop their late messages at once.
MAX_WITHDRAWN = 1 << 16


class TagMatcher(Generic[M]):
    """Posted receives, inboxes, early messages and withdrawn tags.

    `drop` is called with each message that is not received.
    """

    def __init__(
        self, drop: Callable[[M], None], *, max_early: int = MAX_EARLY, max_early_bytes: float = math.inf
    ) -> None:
        self._drop = drop
        self._max_early = max_early
        self._max_early_bytes = max_early_bytes
        self._posted: dict[int, Operation] = {}
        #: Open inboxes, each with the messages that wait for it, by tag.
        self._inboxes: dict[int, tuple[Inbox, dict[int, M]]] = {}
        self._closed_inboxes: OrderedDict[int, None] = OrderedDict()
        #: Messages that wait for their receives, by tag, with their sizes in bytes.
        self._early: OrderedDict[int, tuple[M, int]] = OrderedDict()
        self._early_bytes = 0
        self._withdrawn: OrderedDict[int, None] = OrderedDict()

    @property
    def num_posted(self) -> int:
        """Number of receives that wait for their message."""
        return len(self._posted)

    @property
    def num_inboxes(self) -> int:
        """Number of open inboxes."""
        return len(self._inboxes)

    def expect(self, tag_base: int, inbox: Inbox) -> None:
        """Opens an inbox for the tags of this base."""
        if tag_base_of(tag_base) != tag_base or tag_base in self._inboxes:
            raise ValueError(f"An inbox at {tag_base:#x} is open already, or its tags have no bits to be counted.")
        self._inboxes[tag_base] = (inbox, {})

    def dismiss(self, tag_base: int) -> None:
        """Closes an inbox, and drops its messages from now on. Closing it twice is harmless."""
        opened = self._inboxes.pop(tag_base, None)
        if opened is None:
            return
        _remember(self._closed_inboxes, tag_base)
        for message in opened[1].values():
            self._drop(message)

    def lose(self, error: PdserveError) -> None:
        """The messages that wait for inboxes are lost, as are those that were on their way."""
        for inbox, waiting in list(self._inboxes.values()):
            waiting.clear()
            inbox.lost(error)

    def post(self, receive: Operation) -> M | None:
        """Adds a receive. Returns the message if it came early: the caller receives it now."""
        if receive.tag in self._posted:
            raise ValueError(f"A receive of tag {receive.tag:#x} is outstanding already.")
        self._withdrawn.pop(receive.tag, None)
        opened = self._inboxes.get(tag_base_of(receive.tag))
        if opened is not None and receive.tag in opened[1]:
            return opened[1].pop(receive.tag)
        if receive.tag in self._early:
            return self._take(receive.tag)
        self._posted[receive.tag] = receive
        return None

    def arrive(self, tag: int, message: M, num_bytes: int = 0) -> Operation | None:
        """The receive that the message belongs to; None when it was dropped, or waits for its receive.

        An inbox may have posted that within the call. `num_bytes`: its share of `max_early_bytes` while it waits.
        """
        receive = self._posted.pop(tag, None)
        if receive is not None:
            return receive
        opened = self._inboxes.get(tag_base_of(tag))
        if opened is not None:
            self._offer(*opened, tag, message)
            return None
        is_refused = tag_base_of(tag) in self._closed_inboxes or tag in self._withdrawn
        if is_refused or tag in self._early or num_bytes > self._max_early_bytes:
            self._drop(message)
            return None
        self._early[tag] = message, num_bytes
        self._early_bytes += num_bytes
        while len(self._early) > self._max_early or self._early_bytes > self._max_early_bytes:
            self._drop(self._take(next(iter(self._early))))
        return None

    def holds(self, tag: int) -> bool:
        """Whether a message of this tag waits for the receive of an inbox."""
        opened = self._inboxes.get(tag_base_of(tag))
        return opened is not None and tag in opened[1]

    def withdraw(self, receive: Operation) -> bool:
        """Removes a receive. False when it does not wait: it was matched, is done, or was never posted."""
        if self._posted.get(receive.tag) is not receive:
            return False
        del self._posted[receive.tag]
        _remember(self._withdrawn, receive.tag)
        return True

    def clear(self) -> tuple[list[Operation], list[M]]:
        """Removes and returns all waiting receives and all messages. `lose` then reports to the inboxes."""
        receives, messages = list(self._posted.values()), [self._take(tag) for tag in list(self._early)]
        for _, waiting in self._inboxes.values():
            messages += waiting.values()
            waiting.clear()
        self._posted.clear()
        self._withdrawn.clear()
        return receives, messages

    def _offer(self, inbox: Inbox, waiting: dict[int, M], tag: int, message: M) -> None:
        if tag in waiting:
            self._drop(message)
            return
        waiting[tag] = message
        if not inbox.arrived(tag) and waiting.pop(tag, None) is not None:
            self._drop(message)

    def _take(self, tag: int) -> M:
        message, num_bytes = self._early.pop(tag)
        self._early_bytes -= num_bytes
        return message


class OpensInboxes(Generic[M]):
    """The inboxes of a transport that matches by tag."""

    _matcher: TagMatcher[M]

    def expect(self, tag_base: int, inbox: Inbox) -> None:
        """Opens an inbox."""
        self._matcher.expect(tag_base, inbox)

    def dismiss(self, tag_base: int) -> None:
        """Closes an inbox."""
        self._matcher.dismiss(tag_base)


def _remember(numbers: OrderedDict[int, None], number: int) -> None:
    numbers[number] = None
    if len(numbers) > MAX_WITHDRAWN:
        numbers.popitem(last=False)
