"""JSON of long lists and texts, encoded in pieces: one call of the encoder holds the interpreter's lock to its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic_core import from_json

from pdserve.base.json_lines import on_one_line

Element = TypeVar("Element")

_PIECE = 4096
_PIECE_CHARACTERS = 262_144

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8, on one line for readers of any kind."""
    return on_one_line(_encode(value).encode())


def list_to_json(values: Sequence[Element], shape: Callable[[Element], object]) -> bytes:
    """The list of the shaped values."""
    pieces = [
        to_json([shape(value) for value in values[start : start + _PIECE]])[1:-1]
        for start in range(0, len(values), _PIECE)
    ]
    return b"[%b]" % b",".join(pieces)


def integers_to_json(values: Sequence[int]) -> bytes:
    """The list of the integers."""
    return list_to_json(values, lambda value: value)


def text_to_json(text: str) -> bytes:
    """The text as a JSON string."""
    pieces = [
        to_json(text[start : start + _PIECE_CHARACTERS])[1:-1] for start in range(0, len(text), _PIECE_CHARACTERS)
    ]
    return b'"%b"' % b"".join(pieces)


def object_to_json(text: str) -> bytes:
    """The arguments of a call as a JSON object. Those that were cut off are as clients read such a stream."""
    try:
        if isinstance(from_json(text, allow_inf_nan=False), dict):
            return on_one_line(text.encode())
    except ValueError:
        pass
    try:
        found = from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return b"{}"
    return to_json(found if isinstance(found, dict) else {})
