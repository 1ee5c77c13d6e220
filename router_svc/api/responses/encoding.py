"""Events and responses as JSON. Log-probabilities are long and occur in several events: they are encoded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from router_svc.api.json_pieces import to_json

#: Where there may be something encoded, from an event down to a message's text. All else is encoded at once.
_PATH = frozenset({"response", "output", "item", "content", "part"})


class Encoded:
    """A value that is JSON already."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces)


class EncodedList:
    """A list that grows, and of which nothing is encoded twice."""

    def __init__(self) -> None:
        self._elements: list[bytes] = []

    def add(self, values: Sequence[Any]) -> Encoded:
        """Adds values. Returns the list of them alone."""
        if not values:
            return Encoded(b"[]")
        elements = to_json(values)[1:-1]
        self._elements.append(elements)
        return Encoded(b"[", elements, b"]")

    def now(self) -> Encoded:
        """The list as it is now."""
        self._elements = [b",".join(self._elements)] if self._elements else []
        return Encoded(b"[", *self._elements, b"]")


def pieces_of(value: object) -> Iterator[bytes]:
    """The JSON of a value."""
    match value:
        case Encoded():
            yield from value
        case Mapping():
            start = b"{"
            for name, each in value.items():
                yield b"%b%b:" % (start, to_json(name))
                is_on_path = name in _PATH or isinstance(each, Encoded)
                yield from pieces_of(each) if is_on_path else (to_json(each),)
                start = b","
            yield b"}" if value else b"{}"
        case list():
            yield b"["
            for index, each in enumerate(value):
                if index:
                    yield b","
                yield from pieces_of(each)
            yield b"]"
        case _:
            yield to_json(value)


def event_pieces(event: Mapping[str, Any], number: int) -> Iterable[bytes]:
    """A server-sent event."""
    kind = event["type"]
    yield b"event: %b\ndata: " % kind.encode()
    yield from pieces_of({"type": kind, "sequence_number": number, **event})
    yield b"\n\n"
