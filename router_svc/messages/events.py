"""What a message is made of, in the order in which it is generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the client, or of the model's thinking."""

    text: str
    is_thinking: bool = False


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A call of a tool. Its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON in the end."""

    index: int
    text: str


Event = Text | CallOpened | CallArguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events, in which neighbours of a kind are one: equal for all ways in which a text can be split."""
    runs = groupby(events, key=lambda event: (type(event), getattr(event, "is_thinking", None), _index(event)))
    return [_joined(list(run)) for _, run in runs]


def _index(event: Event) -> int:
    return -1 if isinstance(event, Text) else event.index


def _joined(run: list[Event]) -> Event:
    first = run[0]
    if isinstance(first, CallOpened) or len(run) == 1:
        return first
    return replace(first, text="".join(event.text for event in run if not isinstance(event, CallOpened)))
