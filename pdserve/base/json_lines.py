"""JSON that stays on one line, whatever reads its lines."""

from __future__ import annotations

#: Characters that end a line for `str.splitlines`, and so for httpx's and requests' `iter_lines`; JSON escapes others.
_LINE_ENDS = tuple((character.encode(), b"\\u%04x" % ord(character)) for character in "\x85\u2028\u2029")


def on_one_line(data: bytes) -> bytes:
    """Encoded JSON with those line ends escaped that it may have within texts."""
    for line_end, escaped in _LINE_ENDS:
        data = data.replace(line_end, escaped)
    return data
