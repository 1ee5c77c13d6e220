"""The search: all states that can be reached, an invariant in each, and a way to the end from each.

An action is fair if it happens by itself sooner or later: time passes, a message arrives or is lost, a copy ends. What
clients, routers and workers may or may not do is not fair. A state from which no fair way leads to a final state is one
in which something would be held forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Broken(Exception):
    """An invariant does not hold."""


class World(Protocol):
    """A state of the model."""

    def key(self) -> Hashable:
        """Equal for states that behave alike."""

    def successors(self) -> Iterator[tuple[str, bool, World]]:
        """Name of each possible action, whether it is fair, and the state after it. Raises `Broken`."""

    @property
    def is_final(self) -> bool:
        """Whether everything has ended."""


W = TypeVar("W", bound=World)


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search has seen."""

    num_states: int
    num_transitions: int
    num_final: int
    #: The actions that were taken at least once.
    actions: frozenset[str]


class Counterexample(AssertionError):
    """A way to a state that must not be."""

    def __init__(self, reason: str, path: Iterable[str]) -> None:
        self.path = list(path)
        super().__init__("\n  ".join([reason, *self.path]))


def search(start: World, *, max_states: int) -> Searched:
    """Visits every state. Raises `Counterexample` with a shortest way; `AssertionError` beyond `max_states`."""
    first = start.key()
    parents: dict[Hashable, tuple[Hashable, str] | None] = {first: None}
    fair_before: dict[Hashable, list[Hashable]] = {}
    finals: list[Hashable] = []
    actions: set[str] = set()
    queue, num_transitions = deque([(first, start)]), 0
    while queue:
        key, world = queue.popleft()
        if world.is_final:
            finals.append(key)
        following = world.successors()
        while True:
            try:
                name, is_fair, after = next(following)
            except StopIteration:
                break
            except Broken as broken:
                raise Counterexample(str(broken), [*_path(parents, key), "and then"]) from broken
            num_transitions += 1
            actions.add(name.partition(" ")[0])
            after_key = after.key()
            if is_fair:
                fair_before.setdefault(after_key, []).append(key)
            if after_key not in parents:
                parents[after_key] = key, name
                queue.append((after_key, after))
                assert len(parents) <= max_states, f"more than {max_states} states: narrow the model"
    _require_ends(parents, fair_before, finals)
    return Searched(len(parents), num_transitions, len(finals), frozenset(actions))


def _require_ends(
    parents: dict[Hashable, tuple[Hashable, str] | None],
    fair_before: dict[Hashable, list[Hashable]],
    finals: list[Hashable],
) -> None:
    ending, waiting = set(finals), list(finals)
    while waiting:
        for before in fair_before.get(waiting.pop(), ()):
            if before not in ending:
                ending.add(before)
                waiting.append(before)
    for key in parents:
        if key not in ending:
            raise Counterexample("from here nothing leads to an end by itself", _path(parents, key))


def _path(parents: dict[Hashable, tuple[Hashable, str] | None], key: Hashable) -> list[str]:
    path = []
    step = parents[key]
    while step is not None:
        path.append(step[1])
        step = parents[step[0]]
    return path[::-1]
