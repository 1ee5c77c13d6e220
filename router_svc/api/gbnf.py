"""Grammars in GBNF, respelled so that llguidance's converter to Lark's notation takes them as llama.cpp does. Pure.

The converter would take `.` for all but a newline, escapes of code points without their zeros, `&&`, `--` and `~~` in
classes for operators, and names that differ only in case or hyphens for one. It would lose the brackets of a repeated
group that ends in a repetition.

Source: llama.cpp, grammars/README.md, and its `parse_char` for escapes. `\\-` and `\\^` in classes are xgrammar's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])"
_TOKEN = re.compile(
    r"(?P<comment>#[^\r\n]*)"
    rf'|"(?P<literal>(?:[^"\\]|{_ESCAPE})*)"'
    rf"|\[(?P<class>(?:[^\]\\]|{_ESCAPE})*)\]"
    r'|(?P<open>["\[](?s:.*))'  # A literal or a class that is not closed.
    r"|(?P<name>[\w-]+)"
    r"|(?P<repetition>[*+?]|\{[\d\s,]*\})"
    r"|(?P<any>\.)"
    r"|(?P<end>\))"
    r"|(?P<other>\s+|(?s:.))"
)
_CHARACTER = re.compile(rf"{_ESCAPE}|[^\\]", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in '\\"[]-^'}
_ANY = "[\\x00-\U0010ffff]"
#: Names that the converter keeps.
_KEPT_NAME = re.compile(r"[a-z][a-z0-9_]*")
#: In Lark's notation a rule has no `::=`.
_DEFINES = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF, and not in Lark's notation."""
    return _DEFINES.search(text) is not None


def respelled(text: str) -> str:
    """The same grammar, without comments. What is not valid is left as it is, except for escapes.

    Raises:
        ValueError: for an escape that stands for no character.
    """
    tokens = [*_TOKEN.finditer(text)]
    renamed = _renamed({token[0] for token in tokens if token.lastgroup == "name"})
    made, is_repeated = list[str](), False
    for token in reversed(tokens):
        made.append(_spelled(token, renamed, is_repeated=is_repeated))
        if token.lastgroup != "comment" and not token[0].isspace():
            is_repeated = token.lastgroup == "repetition"
    return "".join(reversed(made))


def _renamed(names: set[str]) -> dict[str, str]:
    """Other names for those that the converter would change."""
    changed = sorted(name for name in names if name == "start" or not _KEPT_NAME.fullmatch(name))
    fresh = (name for number in range(2 * len(names)) if (name := f"rule_{number}") not in names)
    return dict(zip(changed, fresh, strict=False))


def _spelled(token: re.Match[str], renamed: dict[str, str], *, is_repeated: bool) -> str:
    """`is_repeated`: a repetition follows."""
    match token.lastgroup:
        case "comment":
            return ""
        case "literal":
            return f'"{"".join(map(_in_literal, _characters(token["literal"])))}"'
        case "class":
            return _class(token["class"])
        case "name":
            return renamed.get(token[0], token[0])
        case "any":
            return _ANY
        case "end" if is_repeated:
            return ' "")'  # With the empty text, the group ends in no repetition.
        case _:
            return token[0]


def _class(inside: str) -> str:
    if inside == "^":
        return _ANY
    pieces, ranges, at = _CHARACTER.findall(inside.removeprefix("^")), [], 0
    while at < len(pieces):
        is_range = at + 2 < len(pieces) and pieces[at + 1] == "-"
        ends = pieces[at : at + 3 : 2] if is_range else pieces[at : at + 1]
        ranges.append("-".join(_in_class(_character(end)) for end in ends))
        at += 3 if is_range else 1
    return f"[{'^' if inside.startswith('^') else ''}{''.join(ranges)}]"


def _characters(text: str) -> Iterator[str]:
    return map(_character, _CHARACTER.findall(text))


def _character(piece: str) -> str:
    if not piece.startswith("\\"):
        return piece
    if piece[1] in _NAMED:
        return _NAMED[piece[1]]
    code_point = int(piece[2:], 16) if piece[1] in "xuU" else -1
    if not 0 <= code_point <= 0x10FFFF or 0xD800 <= code_point < 0xE000:
        raise ValueError(f"{piece} is no character in GBNF")
    return chr(code_point)


def _in_literal(character: str) -> str:
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    is_control = ord(character) < 0x20 or character == "\x7f"
    return named.get(character) or (f"\\x{ord(character):02x}" if is_control else character)


def _in_class(character: str) -> str:
    return character if character.isalnum() or ord(character) > 0x7F else f"\\x{ord(character):02x}"
