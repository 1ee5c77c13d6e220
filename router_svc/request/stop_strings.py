"""Finds stop strings in streamed text and holds back text that may still become one. Pure.

Each stop string is a Knuth-Morris-Pratt automaton over the characters. The work per character is therefore constant,
and the outcome does not depend on how the text is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """The result of a chunk of text: `text` may be shown, and `matched` is the stop string that ended it."""

    text: str
    matched: str | None = None


class _Automaton:
    """Length of the longest prefix of one stop string that the text so far ends with."""

    __slots__ = ("_failure", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._failure = _failure_table(stop)

    def step(self, character: str) -> bool:
        """Reads one character. True if it completes the stop string."""
        while self.length and self.stop[self.length] != character:
            self.length = self._failure[self.length - 1]
        if self.stop[self.length] == character:
            self.length += 1
        return self.length == len(self.stop)

    def pass_over(self) -> None:
        """Goes on after a match. Only the end of the match may be the start of another one."""
        self.length = self._failure[-1]


def _failure_table(stop: str) -> list[int]:
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table


class StopScanner:
    """Passes text on, except for text that could be the start of a stop string.

    The stop string that is complete first wins, and the longest of several that end at the same character. With
    `include` the text including the stop string is shown, otherwise only the text before it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> Scanned:
        """Reads more text. After a match the scanner must not be used again.

        Without `may_end`, a stop string that is complete within `text` is passed over.
        """
        if not self._automata:
            return Scanned(text=text)
        for position, character in enumerate(text):
            # No short circuit: every automaton must read the character, even after another has matched.
            complete = [automaton for automaton in self._automata if automaton.step(character)]
            if complete and may_end:
                stop = complete[0].stop
                shown = self._held + text[: position + 1]
                return Scanned(text=shown if self._include else shown[: len(shown) - len(stop)], matched=stop)
            for automaton in complete:
                automaton.pass_over()
        shown = self._held + text
        keep = len(shown) - max(automaton.length for automaton in self._automata)
        self._held = shown[keep:]
        return Scanned(text=shown[:keep])

    def flush(self) -> str:
        """The text held back. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held
