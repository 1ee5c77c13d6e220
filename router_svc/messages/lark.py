"""Pieces of grammars in Lark's notation, as llguidance reads it."""

from __future__ import annotations

import json


def quoted(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False)
