"""How `pdserve chat` shows an answer: its text as it is, its thinking folded into one line, and its calls."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pdserve.cli.chat_client import Piece
from pdserve.cli.chat_messages import ToolCall


class AnswerView:
    """Shows one answer while it arrives. Leaving it ends the line that is open.

    The text, and nothing else, goes to standard output. On a terminal, thinking is one line on standard error that
    counts its characters, and at its end says how long it took. `shows_thinking`: all of it goes to standard error.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._notes = _notes()
        self._live: Live | None = None
        self._thinking_since: float | None = None
        self._num_characters = 0
        self._is_line_open = False

    def __enter__(self) -> AnswerView:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_thinking()
        if self._is_line_open:
            print(flush=True)

    def show(self, piece: Piece) -> None:
        """Shows what has arrived."""
        if piece.thinking:
            self._think(piece.thinking)
        if piece.text:
            self._end_thinking()
            sys.stdout.write(printable(piece.text) if sys.stdout.isatty() else piece.text)
            sys.stdout.flush()
            self._is_line_open = True

    def _think(self, text: str) -> None:
        if self._thinking_since is None:
            self._start_thinking()
        self._num_characters += len(text)
        if self._shows_thinking:
            self._notes.print(_dim(text), end="")
        elif self._live is not None:
            self._live.update(_dim(f"Thinking: {self._num_characters:,} characters"), refresh=True)

    def _start_thinking(self) -> None:
        if self._is_line_open and sys.stdout.isatty():
            print(flush=True)
            self._is_line_open = False
        self._thinking_since, self._num_characters = time.monotonic(), 0
        if self._notes.is_terminal and not self._shows_thinking:
            self._live = Live(
                console=self._notes, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()

    def _end_thinking(self) -> None:
        if self._thinking_since is None:
            return
        elapsed_s, self._thinking_since = time.monotonic() - self._thinking_since, None
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._notes.print(_dim(f"Thought for {elapsed_s:.1f} s: {self._num_characters:,} characters"))
        elif self._shows_thinking:
            self._notes.print()


def show_calls(calls: Iterable[ToolCall]) -> None:
    """Prints each call as `name(arguments)` on standard error; one that was cut ends with dots."""
    for call in calls:
        _notes().print(_dim(f"{call.name}({call.arguments}{')' if call.is_complete else '...'}"))


def show_thinking(thinking: str) -> None:
    """Prints all of an answer's thinking on standard error."""
    _notes().print(_dim(thinking or "The last answer has no thinking."))


def printable(text: str) -> str:
    """Removes control characters: a model's output must not move the cursor or rename the window."""
    return "".join(character for character in text if unicodedata.category(character) != "Cc" or character in "\n\t")


def _notes() -> Console:
    """Standard error, for all that is not the answer's text."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _dim(text: str) -> Text:
    return Text(printable(text), style="dim")
