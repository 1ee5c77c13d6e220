"""JSON of long lists and texts, encoded in pieces: one call of the encoder holds the interpreter's lock to its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

Element = TypeVar("Element")

_PIECE = 4096
_PIECE_CHARACTERS = 262_144

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    return _encode(value).encode()


def list_to_json(values: Sequence[Element], shape: Callable[[Element], object]) -> bytes:
    """The list of the shaped values."""
    pieces = [
        to_json([shape(value) for value in values[start : start + _PIECE]])[1:-1]
        for start in range(0, len(values), _PIECE)
    ]
    return b"[%b]" % b",".join(pieces)


def text_to_json(text: str) -> bytes:
    """The text as a JSON string."""
    pieces = [
        to_json(text[start : start + _PIECE_CHARACTERS])[1:-1] for start in range(0, len(text), _PIECE_CHARACTERS)
    ]
    return b'"%b"' % b"".join(pieces)
