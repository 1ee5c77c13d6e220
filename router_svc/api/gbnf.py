"""Grammars in GBNF, in the spelling that llguidance's converter to Lark's notation reads as llama.cpp reads them. Pure.

As they are, the converter reads `.` without newlines, code points without their zeros, and `&&`, `--` and `~~` in
classes as operators. Of `("a"+)?` it loses the brackets, and it has no rule `start` besides `root`.

Source: llama.cpp, grammars/README.md; and its `parse_char` for escapes. `\\-` and `\\^` in classes are xgrammar's.
"""

from __future__ import annotations

import re

_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])"
#: Comments, literals, classes, what is open until the end, the dot, the name `start`, and the end of a repeated group
#: that ends in a repetition. What is between them has the same spelling.
_TERMINAL = re.compile(
    r"(?P<comment>#[^\r\n]*)"
    rf'|"(?P<literal>(?:[^"\\]|{_ESCAPE})*)"'
    rf"|\[(?P<class>(?:[^\]\\]|{_ESCAPE})*)\]"
    r'|(?P<open>["\[](?s:.*))'
    r"|(?P<dot>\.)"
    r"|(?P<start>(?<![\w-])start(?![\w-]))"
    r"|(?P<repeated>(?<=[*+?}])\s*\)(?=[ \t]*[*+?{]))"
)
_CHARACTER = re.compile(rf"{_ESCAPE}|[^\\]", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in '\\"[]-^'}
#: What stands for any character, for a name that the converter gives to `root`, and for the end of such a group.
_REPLACED = {"dot": "[\\x00-\U0010ffff]", "start": "start-", "repeated": ' "")'}
#: In Lark's notation a rule has no `::=`.
_DEFINES = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF, and not in Lark's notation."""
    return _DEFINES.search(text) is not None


def respelled(text: str) -> str:
    """The same grammar. What is not valid is left as it is, except for escapes.

    Raises:
        ValueError: for an escape that stands for no character.
    """
    return _TERMINAL.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    if found["literal"] is not None:
        characters = map(_character, _CHARACTER.findall(found["literal"]))
        return f'"{"".join(map(_in_literal, characters))}"'
    if found["class"] is not None:
        return _class(found["class"])
    return _REPLACED.get(found.lastgroup or "", found[0])


def _class(inside: str) -> str:
    pieces, ranges, at = _CHARACTER.findall(inside.removeprefix("^")), [], 0
    while at < len(pieces):
        is_range = at + 2 < len(pieces) and pieces[at + 1] == "-"
        ends = pieces[at : at + 3 : 2] if is_range else pieces[at : at + 1]
        ranges.append("-".join(_in_class(_character(end)) for end in ends))
        at += 3 if is_range else 1
    return f"[{'^' if inside.startswith('^') else ''}{''.join(ranges)}]"


def _character(piece: str) -> str:
    if not piece.startswith("\\"):
        return piece
    named = _NAMED.get(piece[1])
    code_point = int(piece[2:], 16) if piece[1] in "xuU" else ord(named or "\ud800")
    if code_point > 0x10FFFF or 0xD800 <= code_point < 0xE000:
        raise ValueError(f"{piece} is no character in GBNF")
    return chr(code_point)


def _in_literal(character: str) -> str:
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    return named.get(character) or (character if ord(character) > 0x1F else f"\\x{ord(character):02x}")


def _in_class(character: str) -> str:
    return character if character.isalnum() or ord(character) > 0x7F else f"\\x{ord(character):02x}"
