"""The events of one prompt's request, in order. An endless request does not fill the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from pdserve.base.trace_context import TraceContext
from router_svc.records.events import Event

AnyEvent = TypeVar("AnyEvent", bound=Event)
View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event, and when it happened."""

    #: Its number among all events of the request, from 0.
    number: int
    #: Seconds since the request was accepted, on the router's clock.
    at: float
    #: The number of the attempt before the event, from 1.
    attempt: int
    event: Event
    #: The span of the call to the worker that was chosen.
    call: TraceContext | None


class EventLog:
    """The first and the last events of each kind, half of `Event.max_kept` each, and how many there were in all.

    Each kind loses its middle by itself. So a reader relates events of several kinds by numbers that they carry, or is
    only as exact as the events that are left.
    """

    def __init__(self) -> None:
        self._kept: list[LoggedEvent] = []
        self._totals: defaultdict[type[Event], int] = defaultdict(int)
        #: Events so far.
        self.total = 0
        self._views: dict[Callable[[EventLog], object], tuple[int, object]] = {}

    def append(self, event: Event, *, at: float, attempt: int, call: TraceContext | None = None) -> None:
        """Adds the latest event."""
        kind = type(event)
        if self._totals[kind] >= event.max_kept:
            same = [index for index, logged in enumerate(self._kept) if type(logged.event) is kind]
            del self._kept[same[event.max_kept // 2]]
        self._kept.append(LoggedEvent(self.total, at, attempt, event, call))
        self._totals[kind] += 1
        self.total += 1

    def __iter__(self) -> Iterator[LoggedEvent]:
        return iter(self._kept)

    def __reversed__(self) -> Iterator[LoggedEvent]:
        return reversed(self._kept)

    def of(self, kind: type[AnyEvent]) -> Iterator[tuple[LoggedEvent, AnyEvent]]:
        """The events of one kind, with when they happened."""
        if not self._totals[kind]:
            return iter(())
        return ((logged, logged.event) for logged in self._kept if isinstance(logged.event, kind))

    def last(self, kind: type[AnyEvent]) -> AnyEvent | None:
        """The latest event of a kind, or None."""
        if self._totals[kind]:
            for logged in reversed(self._kept):
                if isinstance(logged.event, kind):
                    return logged.event
        return None

    def num(self, kind: type[Event]) -> int:
        """How many events of a kind there were."""
        return self._totals[kind]

    def view(self, function: Callable[[EventLog], View]) -> View:
        """What a pure function says of the log. It is called again only after an event."""
        total, found = self._views.get(function, (-1, None))
        if total != self.total:
            found = function(self)
            self._views[function] = self.total, found
        return cast("View", found)
