"""Whose turn it is: the messages of a pair are received in the order of their announcements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtransfer.transport.tag_matcher import TagMatcher
from kvtransfer.transport.torch_distributed.pair import Arrival, Pair

#: How long a message waits for memory before it is received elsewhere: well below the limit for a message.
_PATIENCE_S = 2.0


class Turns:
    """Reports a message to its inbox when all before it are received, and receives it when it is known where to.

    An inbox that knew of later ones could give them memory for which the first one waits.
    """

    def __init__(
        self, matcher: TagMatcher[Arrival], max_unmatched_bytes: int, receive: Callable[[Arrival], None]
    ) -> None:
        """`receive` starts to receive a message, the next one of its pair."""
        self._matcher = matcher
        self._max_unmatched_bytes = max_unmatched_bytes
        self._receive = receive

    def announced(self, arrival: Arrival) -> None:
        """A message comes behind those that were announced before."""
        queue = arrival.pair.queue
        queue.append(arrival)
        if len(queue) == 1:
            self.advance(arrival.pair)

    def advance(self, pair: Pair) -> None:
        """Receives what can be received. It may call itself through inboxes, which changes nothing."""
        if pair.is_advancing:
            return
        pair.is_advancing = True
        try:
            while pair.queue and self._may_start(pair.queue[0]):
                self._receive(pair.queue.popleft())
        finally:
            pair.is_advancing = False
        if pair.queue:
            self._wait_for_memory(pair.queue[0])

    def _may_start(self, arrival: Arrival) -> bool:
        if not arrival.is_held:
            arrival.receive = self._matcher.arrive(arrival.tag, arrival, arrival.num_bytes) or arrival.receive
            arrival.is_held = self._matcher.holds(arrival.tag)
        return arrival.may_start

    def _wait_for_memory(self, arrival: Arrival) -> None:
        """Sets a message aside before its sender gives it up, and the pair with it; one at a time."""
        pair = arrival.pair
        if pair.patience is not None:
            pair.patience.cancel()
        has_one_aside = pair.aside is not None and pair.aside.receive is None and not pair.aside.dropped
        if has_one_aside or arrival.num_bytes > self._max_unmatched_bytes:
            return

        def set_aside() -> None:
            if pair.queue and pair.queue[0] is arrival:
                pair.aside, arrival.is_set_aside = arrival, True
                self.advance(pair)

        pair.patience = asyncio.get_running_loop().call_later(_PATIENCE_S, set_aside)
