"""Turns the text of a message, in pieces of any length, into what it means. Pure.

Any split of the text gives the same events, once neighbours are merged. A delimiter that has arrived only in part is
held back. White space next to a delimiter belongs to neither side, and is dropped.
"""

from __future__ import annotations

import regex

from router_svc.messages.calls import CallReader, ToolTypes, call_reader
from router_svc.messages.events import Event, Text
from router_svc.messages.json_reader import NotJson
from router_svc.messages.template import CALLS, SKIPPED, THINKING, Delimiter, Region, Template

#: Delimiters without a character between two others.
_MAX_IDLE = 4


class MessageParser:
    """Parses one message."""

    def __init__(self, template: Template, tools: ToolTypes, *, prefix: str = "") -> None:
        """`prefix`: how the message starts in the prompt, which gives no events."""
        self._template = template
        self._tools = tools
        self._implicit = next((region for region in template.regions if region.opens is None), None)
        self._openings = [(region, region.opens) for region in template.regions if region.opens is not None]
        #: The region that the text is in; None: between two regions, where nothing belongs to the message.
        self._region = self._implicit
        #: Whether there was any thinking.
        self.has_thought = False
        #: Whether the prefix ends within a call.
        self.starts_in_call = False
        self._reader: CallReader | None = None
        self._calls = 0
        #: Text that is not understood yet, from here on.
        self._buffer, self._position = "", 0
        #: White space that is dropped if a delimiter follows.
        self._space = ""
        self._is_behind_delimiter = self._has_delimiters = False
        self._idle = 0
        #: White space, and what is known of delimiters, before a call that may prove to be none.
        self._before_call = ("", False, False)
        self._events: list[Event] = []
        if prefix:
            self.push(prefix)
            self._forget_prefix()

    def _forget_prefix(self) -> None:
        """What follows the prefix belongs to the message. A call that it has opened is not the message's."""
        self.starts_in_call = self._reader is not None
        if self.starts_in_call:
            self._leave()
            self._region = self._implicit
        self._buffer, self._position, self._space = "", 0, ""
        self._calls, self._has_delimiters = 0, False

    @property
    def is_thinking(self) -> bool:
        """Whether the text is in the middle of thinking."""
        return self._region is not None and self._region.name == THINKING

    @property
    def is_in_call(self) -> bool:
        """Whether the text is in the middle of a call."""
        return self._reader is not None and not self._reader.is_complete

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self._calls

    def push(self, text: str) -> list[Event]:
        """More text. Returns what is certain with it."""
        self._buffer = self._buffer[self._position :] + text
        self._position = 0
        while self._advance(is_end=False):
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        """The message is complete. Returns what was held back."""
        while self._advance(is_end=True) or self._has_lost_call():
            pass
        if self._space and not self._has_delimiters:
            self._events.append(Text(self._space))
        self._leave()
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _advance(self, *, is_end: bool) -> bool:
        """Handles the text up to the next delimiter. Returns whether there was one."""
        if self._reader is not None and not self._reader.is_complete:
            return self._read_call(is_end)
        region, found, end = self._next_delimiter(is_end)
        if end > self._position:
            self._put(self._buffer[self._position : end])
            self._position, self._idle = end, 0
        if found is None or region is None:
            return False
        # Two delimiters of no width could follow each other for ever.
        self._idle = self._idle + 1 if found.end() == self._position else 0
        self._position = found.end()
        self._before_call = (self._space, self._is_behind_delimiter, self._has_delimiters)
        self._leave()
        is_opening = region is not self._region and region.name != SKIPPED
        self._region = region if is_opening else self._implicit
        self.has_thought = self.has_thought or self.is_thinking
        if is_opening and region.name == CALLS:
            name = found.groupdict().get("name")
            self._reader = call_reader(region, found.group(), name, self._calls, self._tools, self._events)
        self._is_behind_delimiter = self._has_delimiters = True
        return self._idle < _MAX_IDLE

    def _read_call(self, is_end: bool) -> bool:
        """Gives the reader of calls the text. Returns whether the calls are complete with it."""
        assert self._reader is not None
        assert self._region is not None
        before = self._position
        try:
            self._position = self._reader.take(self._buffer, self._position, self._events, is_end=is_end)
        except NotJson:
            self._give_up_call()
            return True
        if self._position > before:
            self._idle = 0
        if self._reader.is_complete and self._region.closes is None:
            self._leave()
            self._region, self._is_behind_delimiter = self._implicit, True
        return self._reader is None or self._reader.is_complete

    def _has_lost_call(self) -> bool:
        """Whether a call without a name is given up at the end, and its text is read as such."""
        if self._reader is None or self._reader.is_complete or not self._reader.source:
            return False
        self._give_up_call()
        return True

    def _give_up_call(self) -> None:
        """What looked like a call is text."""
        assert self._reader is not None
        text = self._reader.source + self._buffer[self._position :]
        space, self._is_behind_delimiter, self._has_delimiters = self._before_call
        self._leave()
        self._region, self._space = self._implicit, space
        # Its first character by itself, so that the same delimiter does not open the same call again.
        self._put(text[:1])
        self._buffer, self._position = text[1:], 0

    def _next_delimiter(self, is_end: bool) -> tuple[Region | None, regex.Match[str] | None, int]:
        """The next delimiter with its region, and where the text before it, or before one that may come, ends."""
        best: tuple[int, int, Region, regex.Match[str]] | None = None
        hold = len(self._buffer)
        for region, delimiter in self._watched():
            found = delimiter.pattern.search(self._buffer, self._position, partial=not is_end)
            if found is None:
                continue
            at_end = found.end() == len(self._buffer) and not is_end
            if at_end and (found.partial or delimiter.can_grow):
                hold = min(hold, found.start())
                continue
            key = (found.start(), found.start() - found.end())
            if best is None or key < best[:2]:
                best = (*key, region, found)
        if best is None or best[0] >= hold:
            return None, None, hold
        return best[2], best[3], best[0]

    def _watched(self) -> list[tuple[Region, Delimiter]]:
        if self._region is not None and self._region is not self._implicit:
            return [] if self._region.closes is None else [(self._region, self._region.closes)]
        return self._openings

    def _leave(self) -> None:
        """The present region is over."""
        if self._reader is not None:
            self._calls = self._reader.next_index
            self._reader = None
        self._space = ""

    def _put(self, text: str) -> None:
        """Text of the present region."""
        if self._region is None or not text:
            return
        if self._reader is not None:
            return  # Between a call's end and the delimiter behind it.
        if self._is_behind_delimiter:
            text = text.lstrip()
            if not text:
                return
            self._is_behind_delimiter = False
        kept = (self._space + text).rstrip()
        self._space = (self._space + text)[len(kept) :]
        if kept:
            self._events.append(Text(kept, self.is_thinking))
