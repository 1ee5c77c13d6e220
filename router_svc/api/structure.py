"""Bounds the structure of a JSON text before it is parsed.

The parser is one call, during which no other thread runs, the event loop's included. It takes 1 ms for 8 MiB in one
string, but most of a second for 8 MiB of empty lists. So values are counted first, in pieces between which others run.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import TooLarge

#: Objects, lists and keys of a body. 4096 messages with four fields each have 25,000.
MAX_CONTAINERS = 65_536
#: Values of a body, enough for a prompt of a million token ids.
MAX_VALUES = 1_200_000
#: Smaller bodies cannot exceed either limit by much: parsing them takes less than 10 ms.
_ALWAYS_PARSED_BYTES = 64 * 1024
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Counts of a JSON text. `containers` has objects, lists and keys; `values` has all separators of values."""

    containers: int
    values: int


def require_light(body: bytes) -> None:
    """Raises `TooLarge` for a text with more objects, keys or values than any request of this API needs."""
    if len(body) <= _ALWAYS_PARSED_BYTES:
        return
    found = structure_of(body)
    if found.containers > MAX_CONTAINERS:
        raise TooLarge(
            f"The request body has {found.containers} objects, lists and keys (limit {MAX_CONTAINERS}). Send less."
        )
    if found.values > MAX_VALUES:
        raise TooLarge(f"The request body has {found.values} values (limit {MAX_VALUES}). Send less.")


def structure_of(body: bytes) -> Structure:
    """Counts outside of strings. Stops soon after a limit, and is exact for valid JSON below it."""
    containers = values = 0
    is_inside = False
    start = 0
    while start < len(body) and containers <= MAX_CONTAINERS and values <= MAX_VALUES:
        end = min(start + _PIECE_BYTES, len(body))
        piece = body[start:end]
        if piece.endswith(b"\\") and end < len(body):
            # A piece does not end between an escape and its character.
            end -= len(piece) - len(piece.rstrip(b"\\"))
            if end == start:
                end = start + _PIECE_BYTES
            piece = body[start:end]
        quoted = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(quoted[is_inside::2])
        containers += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        values += outside.count(b",")
        is_inside ^= len(quoted) % 2 == 0
        start = end
    return Structure(containers=containers, values=values)
