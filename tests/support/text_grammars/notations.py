"""Grammars in the notations that clients send: regular expressions, GBNF and Lark's."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.support.text_grammars.nodes import Chain, Choice, Class, Literal, Node, Repeat, Rule, Rules

_NAMED = {"\n": "n", "\t": "t"}
_OF_EXPRESSIONS, _OF_LITERALS, _OF_CLASSES = "\\.+*?()|[]{}^$/#&-~", '\\"', "\\]^-[&~/"


def expression(node: Node) -> str:
    """A regular expression. There are no rules in it."""
    match node:
        case Literal(text):
            return f"(?:{''.join(_escaped(each, _OF_EXPRESSIONS) for each in text)})"
        case Class():
            return _class(node, _in_class)
        case Chain(items):
            return f"(?:{''.join(map(expression, items))})"
        case Choice(items):
            return f"(?:{'|'.join(map(expression, items))})"
        case Repeat(item, minimum, maximum):
            return f"(?:{expression(item)}){_times(minimum, maximum)}"
        case Rule():
            raise ValueError("regular expressions have no rules")


def choice(rules: Rules) -> list[str]:
    """The texts of which one has to be chosen."""
    root = rules["root"]
    assert isinstance(root, Choice)
    return [item.text for item in root.items if isinstance(item, Literal)]


def gbnf(rules: Rules) -> str:
    """GBNF, as llama.cpp reads it."""
    return "\n".join(f"{name} ::= {_gbnf(node)}" for name, node in rules.items())


def _gbnf(node: Node) -> str:
    match node:
        case Literal(text):
            return f'"{"".join(_escaped(each, _OF_LITERALS) for each in text)}"'
        case Class():
            return _class(node, _in_class_of_gbnf)
        case Chain(items):
            return f"({' '.join(map(_gbnf, items))})"
        case Choice(items):
            return f"({' | '.join(map(_gbnf, items))})"
        case Repeat(item, minimum, maximum):
            return f"({_gbnf(item)}){_times(minimum, maximum)}"
        case Rule(name):
            return name


def lark(rules: Rules) -> str:
    """Lark's notation. Names in capitals are terminals."""
    renamed = {"root": "start"}
    return "\n".join(f"{renamed.get(name, name)}: {_lark(node)}" for name, node in rules.items())


def _lark(node: Node) -> str:
    match node:
        case Literal(text):
            return json.dumps(text, ensure_ascii=False)
        case Class():
            return f"/{_class(node, _in_class)}/"
        case Chain(items):
            return f"({' '.join(map(_lark, items))})"
        case Choice(items):
            return f"({' | '.join(map(_lark, items))})"
        case Repeat(item, minimum, maximum):
            return f"({_lark(item)}){_times(minimum, maximum)}"
        case Rule(name):
            return name


def _class(node: Class, spelled: Callable[[str], str]) -> str:
    ranges = (spelled(first) if first == last else f"{spelled(first)}-{spelled(last)}" for first, last in node.ranges)
    return f"[{'^' if node.is_negated else ''}{''.join(ranges)}]"


def _in_class(character: str) -> str:
    return _escaped(character, _OF_CLASSES)


def _in_class_of_gbnf(character: str) -> str:
    """Characters are written in every way that there is."""
    if character in "^-/&~":
        return f"\\x{ord(character):02X}"
    if ord(character) > 0xFFFF:
        return f"\\U{ord(character):08x}"
    return f"\\u{ord(character):04x}" if character == "ü" else _escaped(character, "\\][")


def _escaped(character: str, special: str) -> str:
    if character in _NAMED:
        return "\\" + _NAMED[character]
    return "\\" + character if character in special else character


def _times(minimum: int, maximum: int | None) -> str:
    named = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    if (minimum, maximum) in named:
        return named[minimum, maximum]
    if minimum == maximum:
        return f"{{{minimum}}}"
    return f"{{{minimum},{'' if maximum is None else maximum}}}"
