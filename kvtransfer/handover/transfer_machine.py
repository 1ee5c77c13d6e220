"""What both state machines of a handover have in common: a table of moves, and a history for errors. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from kvtransfer.handover import transfer_errors

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event")
Effect = TypeVar("Effect")


class TransferMachine(ABC, Generic[State, Event, Effect]):
    """A protocol of one side: events in, effects out, and time is an argument."""

    def __init__(self, state: State, transitions: Mapping[State, Mapping[type[Event], frozenset[State]]]) -> None:
        """`transitions`: where each event may lead. An event that is not listed for a state is illegal there."""
        self.state = state
        self._transitions = transitions
        self._story = [str(state.value)]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The effects of one event.

        Raises: InvalidTransition, or an error for the sender of the event. The machine is then unchanged.
        """
        before, moves = self.state, self._transitions[self.state]
        if type(event) not in moves:
            raise transfer_errors.illegal_event(str(before.value), event, self._story)
        effects = self._dispatch(event, now)
        if self.state is not before:
            assert self.state in moves[type(event)], f"{before} -> {self.state} on {event!r}"
            self._story.append(f"{self.state.value} on {type(event).__name__}")
        return effects

    @abstractmethod
    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        """Takes an event that the table allows, and sets the state."""
