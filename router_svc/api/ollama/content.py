"""The content of an answer: from what the parser reads to text, thinking and complete calls. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router_svc.api.json_pieces import object_to_json, text_to_json, to_json
from router_svc.messages.events import CallArguments, CallOpened, Event, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A complete call. `arguments` is JSON text; what was cut off is read as far as it goes."""

    id: str
    index: int
    name: str
    arguments: str

    def to_json(self) -> bytes:
        """The call with its arguments as an object."""
        head = b'{"id":%b,"function":{"index":%d,"name":%b' % (to_json(self.id), self.index, to_json(self.name))
        return head + b',"arguments":%b}}' % object_to_json(self.arguments)


@dataclass(slots=True)
class Piece:
    """More of an answer, or all of it."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.text or self.thinking or self.calls)

    def add(self, more: Piece) -> None:
        """Adds what comes behind it."""
        self.text += more.text
        self.thinking += more.thinking
        self.calls += more.calls

    def to_message(self) -> bytes:
        """`"message":{...}`, as answers of chats have it."""
        calls = b',"tool_calls":[%b]' % b",".join(call.to_json() for call in self.calls) if self.calls else b""
        return b'"message":{"role":"assistant","content":%b%b%b}' % (_joined(self.text), self._thinking(), calls)

    def to_response(self) -> bytes:
        """`"response":...`, as answers to single prompts have it."""
        return b'"response":%b%b' % (_joined(self.text), self._thinking())

    def _thinking(self) -> bytes:
        return b',"thinking":%b' % _joined(self.thinking) if self.thinking else b""


class ContentReader:
    """Turns the events of one answer into pieces. Together they are the same for any split of the text.

    A call comes as a whole, since its arguments are an object: when something follows it, or at the end.
    """

    def __init__(self, call_id: Callable[[int], str], *, shows_thinking: bool) -> None:
        """`call_id`: the id of a call, from its number in the answer."""
        self._call_id = call_id
        self._shows_thinking = shows_thinking
        self._opened: CallOpened | None = None
        self._arguments: list[str] = []

    def push(self, events: Iterable[Event]) -> Piece:
        """What is complete of more content."""
        piece = Piece()
        for event in events:
            match event:
                case CallArguments():
                    self._arguments.append(event.text)
                case CallOpened():
                    self._close(piece)
                    self._opened = event
                case Text():
                    self._close(piece)
                    if not event.is_thinking:
                        piece.text.append(event.text)
                    elif self._shows_thinking:
                        piece.thinking.append(event.text)
        return piece

    def finish(self) -> Piece:
        """What is left at the end."""
        piece = Piece()
        self._close(piece)
        return piece

    def _close(self, piece: Piece) -> None:
        if self._opened is None:
            return
        index, name = self._opened.index, self._opened.name
        arguments = "".join(self._arguments)
        piece.calls.append(Call(id=self._call_id(index), index=index, name=name, arguments=arguments))
        self._opened = None
        self._arguments.clear()


def _joined(texts: list[str]) -> bytes:
    return text_to_json("".join(texts))
