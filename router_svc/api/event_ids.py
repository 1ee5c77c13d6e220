"""The `id:` of server-sent events: what a client has, in its own words, so that any router can go on behind it. Pure.

    9f3c01aa-o1              events before any token, up to that of choice 1
    9f3c01aa-57              57 tokens of the only choice
    9f3c01aa-57x3.12e.56x5   57 tokens of three choices, 12 of one that has ended, 56 of five
    9f3c01aa-u, 9f3c01aa-d   all tokens and the usage; everything

The name before the hyphen is the stream's. It keeps apart streams that have the same request id, one after the other.
Numbers of events would not do: how the tokens of several choices take turns is not the same in every run.

Once the stream can be resumed, every event has an id. An id covers all events before it, so an event without one that
came in between would come twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from pdserve.base.errors import RequestError
from router_svc.request.output import ChoiceDelta

HEADER = "Last-Event-ID"
#: Characters of a stream's name.
NAME_CHARACTERS = 8
#: Longer than that of any request.
_MAX_CHARACTERS = 8192
_MAX_CHOICES = 1024
_RUN = re.compile(r"([0-9]{1,9})(e?)(?:x([0-9]{1,3}))?", re.ASCII)
_RUNS = rf"{_RUN.pattern}(?:\.{_RUN.pattern})*"
_ID = re.compile(rf"([0-9a-f]{{8}})-(?:o([0-9]{{1,3}})|([ud])|({_RUNS}))", re.ASCII)
#: What `parse_event_id` reads, for the document.
SCHEMA = {
    "type": "string",
    "maxLength": _MAX_CHARACTERS,
    "pattern": f"^(?:{_ID.pattern})?$",
}

#: Tokens of a choice, and whether it has ended. Later states are greater.
State = tuple[int, bool]
_NONE: State = (0, False)
_ALL: State = (10**9, True)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client has of a stream. `states` is empty when it has no token, or all of them."""

    name: str = ""
    openings: int = 0
    states: tuple[State, ...] = ()
    has_all_tokens: bool = False
    has_end: bool = False

    def state(self, choice: int) -> State:
        """What it has of a choice."""
        if self.has_all_tokens:
            return _ALL
        return self.states[choice] if self.states else _NONE


NOTHING = Seen()


def parse_event_id(text: str, *, param: str = HEADER) -> Seen:
    """What a client has that sends this as `param`. Empty: nothing. Raises `RequestError`."""
    if not text:
        return NOTHING
    found = _ID.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if found is None:
        raise _unreadable(text, param)
    name, opening, end, runs = found.group(1, 2, 3, 4)
    if opening is not None:
        return Seen(name, openings=int(opening) + 1)
    if end is not None:
        return Seen(name, openings=_ALL[0], has_all_tokens=True, has_end=end == "d")
    states: list[State] = []
    for count, ended, times in _RUN.findall(runs):
        states += [(int(count), bool(ended))] * int(times or 1)
        if len(states) > _MAX_CHOICES:
            raise _unreadable(text, param)
    return Seen(name, openings=_ALL[0], states=tuple(states))


def _unreadable(text: str, param: str) -> RequestError:
    return RequestError(
        f"{param} is {text[:40]!r}, which is no id of an event of this API. Send that of the last event that you got, "
        "or leave it out to get the stream from its start.",
        param=param,
    )


class EventIds:
    """Numbers the events of one response, and knows which of them the client has.

    An id is None for an event that the client has, and empty for one that comes before the stream can be resumed.
    """

    def __init__(
        self,
        name: str,
        num_choices: int,
        seen: Seen = NOTHING,
        *,
        can_be_resumed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Raises `RequestError` when `seen` is of a response with another number of choices."""
        if seen.states and len(seen.states) != num_choices:
            raise RequestError(
                f"{HEADER} has {len(seen.states)} choices, but the stream has {num_choices}. Send the last `id` of "
                "this stream.",
                param=HEADER,
            )
        self._name = name
        self._seen = seen
        #: What was passed on of each choice, and what the client has of it then.
        self._passed = [_NONE] * num_choices
        self._states = [seen.state(index) for index in range(num_choices)]
        self._can_be_resumed = can_be_resumed
        self._has_started = False

    def opening(self, index: int) -> str | None:
        """The id of a choice's event before its first token."""
        return None if index < self._seen.openings else self._id(f"o{index}")

    def after(self, delta: ChoiceDelta) -> str | None:
        """The id of the event with this new output, which comes next."""
        index, seen = delta.choice_index, self._seen.state(delta.choice_index)
        state = self._passed[index] = (self._passed[index][0] + len(delta.token_ids), delta.finish_reason is not None)
        # The client keeps what it has of other choices, which this router may not have passed on again yet.
        self._states[index] = max(state, seen)
        return None if state <= seen else self._id(self._runs())

    def usage(self) -> str | None:
        """The id of the event with the usage."""
        return None if self._seen.has_all_tokens else self._id("u")

    def done(self) -> str | None:
        """The id of the last event."""
        return None if self._seen.has_end else self._id("d")

    def _id(self, what: str) -> str:
        self._has_started = self._has_started or self._can_be_resumed()
        return f"{self._name}-{what}" if self._has_started else ""

    def _runs(self) -> str:
        if len(self._states) == 1:
            return _state(self._states[0])
        runs = ((state, sum(1 for _ in group)) for state, group in groupby(self._states))
        return ".".join(_state(state) + (f"x{times}" if times > 1 else "") for state, times in runs)


def _state(state: State) -> str:
    return f"{state[0]}e" if state[1] else str(state[0])
