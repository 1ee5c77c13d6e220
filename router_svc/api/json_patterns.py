"""Regular expressions of JSON schemas, as far as they mean the same in their own dialect and in that of grammars."""

from __future__ import annotations

import re

#: An escape that means the same in both: a class, a control character, a code point, a property, a literal sign.
_ESCAPE = re.compile(
    r"\\(?:[dDwWsSbBnrtfv0-9]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{|[pP]\{|k<|[^A-Za-z0-9]|\Z)", re.DOTALL
)
#: Groups without those that look around, which are refused by the grammar. Flags: `i` and `s`.
_GROUP = re.compile(r"\(\?(?::|P?<|=|!|[is]+[:)])")
#: What stands for U+0000 without brackets, alone or among others.
_MAY_BE_NUL = re.compile(r"\x00|\\x00|\\u0000|\\u\{0+\}|\\[pP]\{[^}]*\}")
_SET_OPERATORS = ("&&", "--", "~~")


def pattern_problem(pattern: str) -> str:
    """Why a pattern would not be read as JSON schema means it; empty: it would, or is refused by the grammar."""
    index, is_in_class = 0, False
    while index < len(pattern):
        rest = pattern[index : index + 16]
        if rest[0] == "\\":
            found = _ESCAPE.match(rest)
            if found is None:
                return f"the escape `{rest[:2]}` has different meanings in different dialects"
            index += found.end()
            continue
        if is_in_class and (rest[0] == "[" or rest[:2] in _SET_OPERATORS):
            return f"`{rest[:2]}` within brackets is read as an operation on sets. Escape it"
        if rest[0] == "[":
            is_in_class = True
            if rest.startswith(("[]", "[^]")):
                return "brackets that start with `]` have different meanings in different dialects. Escape it"
        elif rest[0] == "]":
            is_in_class = False
        elif not is_in_class and rest.startswith("(?") and not _GROUP.match(rest):
            return f"the group `{rest[:4]}` has different meanings in different dialects"
        elif not is_in_class and rest[0] in "*+?}" and rest[1:2] in ("*", "+", "{"):
            return f"`{rest[:2]}` repeats a repetition"
        index += 1
    return ""


def pattern_for_library(pattern: str) -> str:
    """The pattern without U+0000, which no text can have.

    In a JSON string, llguidance 1.9 takes a class with all control characters for one that has quotes and backslashes.
    """
    made, index, is_in_class = "", 0, False
    while index < len(pattern):
        if not is_in_class and (found := _MAY_BE_NUL.match(pattern, index)):
            made, index = f"{made}[[{found[0]}]--\\x00]", found.end()
            continue
        sign = pattern[index : index + 2] if pattern[index] == "\\" else pattern[index]
        index += len(sign)
        if sign == "[" and not is_in_class:
            sign, is_in_class = "[[", True
        elif sign == "]" and is_in_class:
            sign, is_in_class = "]--\\x00]", False
        made += sign
    return made
