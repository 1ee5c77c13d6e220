"""The input of a custom tool, read from the arguments of the function that stands for it while they are generated."""

from __future__ import annotations

import json
import re

#: The start of the arguments, up to the text. The grammar of a call allows white space between tokens.
_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
#: What a JSON string may have before its end: no quote, no backslash but of a whole escape.
_COMPLETE = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
#: The first half of a character outside the basic plane, at the end of what has come so far.
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class CustomInput:
    """Reads one input. Any split of the arguments gives the same text."""

    def __init__(self) -> None:
        self._waiting = ""
        self._has_started = False
        self._has_ended = False

    def add(self, arguments: str) -> str:
        """The text that these further arguments complete."""
        self._waiting += arguments
        if not self._has_started:
            start = _START.match(self._waiting)
            if start is None:
                return ""
            self._has_started = True
            self._waiting = self._waiting[start.end() :]
        if self._has_ended:
            return ""
        match = _COMPLETE.match(self._waiting)
        assert match is not None
        encoded = match.group()
        half = _HALF.search(encoded)
        if half is not None and not self._waiting.startswith('"', match.end()):
            encoded = encoded[: half.start()]
        self._waiting = self._waiting[len(encoded) :]
        self._has_ended = self._waiting.startswith('"')
        text: str = json.loads(f'"{encoded}"', strict=False)
        return text
