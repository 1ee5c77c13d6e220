"""Reads JSON that arrives in pieces of any length. Keeps no more of it than it has to. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

_SPACE = " \t\n\r"
_SCALAR_START = frozenset("-0123456789tfn")


class NotJson(Exception):
    """The text is not what was expected of it."""


class ValueReader:
    """Finds the end of one JSON value. Whether it is valid inside is not its concern."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_scalar = False
        self._is_escaped = False
        self._has_started = False
        self.is_complete = False

    def take(self, text: str, start: int) -> tuple[int, int]:
        """Where the value's characters are in `text[start:]`, white space before it left out. Raises `NotJson`."""
        first = start
        while not self._has_started:
            if first == len(text):
                return first, first
            if text[first] in _SPACE:
                first += 1
                continue
            self._start(text[first])
            if self._is_string or self._depth:
                return first, self._rest(text, first + 1)
        return first, self._rest(text, first)

    def _start(self, character: str) -> None:
        self._has_started = True
        if character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth = 1
        elif character in _SCALAR_START:
            self._is_scalar = True
        else:
            raise NotJson

    def _rest(self, text: str, position: int) -> int:
        while position < len(text) and not self.is_complete:
            character = text[position]
            if self._is_scalar:
                if character in _SPACE or character in ",}]":
                    self.is_complete = True
                    return position
            elif self._is_string:
                self._in_string(character)
            else:
                self._is_string = character == '"'
                self._depth += (character in "{[") - (character in "}]")
                self.is_complete = self._depth == 0
            position += 1
        return position

    def _in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = False
            self.is_complete = self._depth == 0


class _Expected(Enum):
    OBJECT = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()
    NOTHING = auto()


_FOLLOWING = {
    (_Expected.OBJECT, "{"): _Expected.KEY_OR_END,
    (_Expected.KEY_OR_END, "}"): _Expected.NOTHING,
    (_Expected.COLON, ":"): _Expected.VALUE,
    (_Expected.NEXT, ","): _Expected.KEY,
    (_Expected.NEXT, "}"): _Expected.NOTHING,
}


class ObjectReader:
    """Reads an object of JSON, and passes on the values of its keys piece by piece."""

    def __init__(self, on_value: Callable[[str, str, bool], None]) -> None:
        """`on_value` gets a key, more of its value's text, and whether the value is complete with it."""
        self._on_value = on_value
        self._expected = _Expected.OBJECT
        self._key_text = ""
        self._key = ""
        self._value = ValueReader()
        #: What was read of the last text, also if it was none of an object.
        self.position = 0

    @property
    def is_complete(self) -> bool:
        """Whether the object has ended."""
        return self._expected is _Expected.NOTHING

    def take(self, text: str, start: int = 0) -> int:
        """Reads `text[start:]` up to the object's end, and returns where it stopped. Raises `NotJson`."""
        position = self.position = start
        while position < len(text) and not self.is_complete:
            self.position = position
            if self._expected is _Expected.VALUE or self._is_in_key(text[position]):
                position = self._take_value(text, position)
            elif text[position] in _SPACE:
                position += 1
            else:
                self._take_mark(text[position])
                position += 1
        return position

    def _is_in_key(self, character: str) -> bool:
        is_expected = self._expected in (_Expected.KEY, _Expected.KEY_OR_END)
        return is_expected and (bool(self._key_text) or character == '"')

    def _take_value(self, text: str, start: int) -> int:
        """More of a value, or of a key, which is one, too."""
        first, end = self._value.take(text, start)
        self.position = end
        if self._expected is _Expected.VALUE:
            if end > first or self._value.is_complete:
                self._on_value(self._key, text[first:end], self._value.is_complete)
            following = _Expected.NEXT
        else:
            self._expected = _Expected.KEY
            self._key_text += text[first:end]
            following = _Expected.COLON
        if self._value.is_complete:
            if following is _Expected.COLON:
                self._key, self._key_text = string_of(self._key_text), ""
            self._expected, self._value = following, ValueReader()
        return end

    def _take_mark(self, character: str) -> None:
        following = _FOLLOWING.get((self._expected, character))
        if following is None:
            raise NotJson
        self._expected = following


def string_of(text: str) -> str:
    """The string of a JSON text. Raises `NotJson`."""
    if not text.startswith('"'):  # Anything else may be nested too deeply to be read.
        raise NotJson
    try:
        value: str = json.loads(text)
    except ValueError as error:
        raise NotJson from error
    return value
