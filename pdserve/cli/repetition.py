"""Notices when a model repeats itself, as small models do. Pure: text goes in, a finding comes out."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Length of the text that is examined; the unit found is at most a quarter of it.
_WINDOW_CHARS = 2000
#: Length of the text that is kept, which includes whitespace and list numbers.
_KEPT_CHARS = 2 * _WINDOW_CHARS
#: Thresholds that ordinary answers do not reach, with their ruled lines, refrains and tables of zeros.
_MIN_REPEATED_CHARS = 400
_MIN_REPEATS = 4

#: The number of a list item, at the start of its line.
_LIST_NUMBER = re.compile(r"^\s*\d+[.:)]\s", re.MULTILINE)
_WHITESPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A unit of text that occurs `count` times in a row at the end of an answer."""

    unit: str
    count: int


class RepetitionDetector:
    """Watches a text while it grows. Neither line breaks nor the numbers of list items hide a repetition."""

    def __init__(self) -> None:
        self._tail = ""

    def feed(self, text: str) -> Repetition | None:
        """Adds text; returns the repetition that the text now ends with, if there is one."""
        self._tail = (self._tail + text)[-_KEPT_CHARS:]
        words = _WHITESPACE.sub(" ", _LIST_NUMBER.sub("\n", self._tail))
        return find_repetition(words[-_WINDOW_CHARS:])


def find_repetition(text: str) -> Repetition | None:
    """The unit that `text` ends with at least 4 times in a row, over at least 400 characters; None without one.

    The last occurrence may be incomplete. Takes time linear in the length of `text`.

    Source: the prefix function of Knuth, Morris and Pratt, applied to the reversed text.
    """
    backwards = text[::-1]
    borders = [0] * len(backwards)
    border = found = 0
    for index in range(1, len(backwards)):
        while border and backwards[index] != backwards[border]:
            border = borders[border - 1]
        border += backwards[index] == backwards[border]
        borders[index] = border
        length = index + 1
        period = length - border
        if length >= _MIN_REPEATED_CHARS and length >= _MIN_REPEATS * period:
            found = length  # Goes on: the repetition may have started earlier.
        elif found:
            break
    if not found:
        return None
    period = found - borders[found - 1]
    start = len(text) - found
    if start and text[start].isalnum() and text[start - 1].isalnum():
        # It starts within a word, as in "Il ... il ... il ...". The next word reads better.
        start += max(0, text.find(" ", start, start + period) + 1 - start)
    return Repetition(unit=text[start:][:period], count=found // period)
