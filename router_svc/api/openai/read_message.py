"""The message of one choice while it is generated, as events."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from router_svc.api.openai.chat_reading import ChatReading
from router_svc.messages.events import Event, Text


class ReadMessage:
    """Reads one message. The events are the same for any split of the text."""

    def __init__(self, reading: ChatReading | None) -> None:
        """`reading` None: the message is plain text."""
        self._parser = None if reading is None else reading.parser()
        self._has_text = reading is None or not reading.requires_call
        #: Whether it ends in the middle of a call.
        self.has_cut_call = False
        #: Tokens of thinking so far.
        self.reasoning_tokens = 0

    @property
    def calls(self) -> int:
        """Calls so far."""
        return 0 if self._parser is None else self._parser.calls

    def add(self, pieces: Sequence[str], *, is_end: bool, has_tokens: bool = True) -> list[Event]:
        """The events of more text, a piece for each token."""
        if self._parser is None:
            return [Text(piece) for piece in pieces if piece]
        events: list[Event] = []
        for piece in pieces:
            before = self._parser.is_thinking
            events += self._parser.push(piece)
            self.reasoning_tokens += has_tokens and (before or self._parser.is_thinking)
        if is_end:
            self.has_cut_call = self._parser.is_in_call
            # What is left of a message without text is the head of a call that was cut.
            events += [event for event in self._parser.finish() if self._has_text or not _is_answer(event)]
        return events


def _is_answer(event: Event) -> bool:
    return isinstance(event, Text) and not event.is_thinking


def call_id(response_id: str, choice: int, call: int, *, characters: int) -> str:
    """The id of a call, of at most this many characters. Equal on any router that makes the response."""
    digest = call_digest(response_id, choice, call)
    return digest[:characters] if characters < len("call_") + 8 else f"call_{digest[:characters]}"


def call_digest(response_id: str, choice: int, call: int) -> str:
    """What the ids of calls are made of, in hexadecimal digits."""
    return hashlib.blake2b(f"{response_id}/{choice}/{call}".encode()).hexdigest()
