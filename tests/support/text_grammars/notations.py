"""Grammars in the notations that clients send: regular expressions, GBNF and Lark's."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.text_grammars.nodes import Chain, Choice, Class, Literal, Node, Repeat, Rule, Rules

_NAMED = {"\n": "n", "\t": "t", "\x7f": "x7f"}
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
    """GBNF, as llama.cpp reads it, in one of its layouts: with comments, lines, brackets and odd names of rules."""
    return _Gbnf(rules).text()


class _Gbnf:
    def __init__(self, rules: Rules) -> None:
        self._rng = random.Random(str(rules))
        self._rules = rules
        self._names = {"root": "root"} | {
            name: self._rng.choice((name, f"{name}-of-it", f"1{name}", f"{name}_", name.swapcase()))
            for name in rules.keys() - {"root"}
        }
        if other := sorted(rules.keys() - {"root"}):
            self._names[self._rng.choice(other)] = "start"

    def text(self) -> str:
        """All rules."""
        end = self._rng.choice(("", ' # a comment: ) * " [', "  "))
        return "\n".join(f"{self._names[name]} ::= {self._of(node)}{end}" for name, node in self._rules.items())

    def _of(self, node: Node) -> str:
        match node:
            case Literal(text):
                return f'"{"".join(_escaped(each, _OF_LITERALS) for each in text)}"'
            case Class():
                return _class(node, _in_class_of_gbnf)
            case Chain(items):
                return self._group(" ".join(map(self._of, items)))
            case Choice(items):
                return self._group(" | ".join(map(self._of, items)))
            case Repeat(item, minimum, maximum):
                return self._group(self._of(item)) + _times(minimum, maximum)
            case Rule(name):
                return self._names[name]

    def _group(self, inside: str) -> str:
        before = self._rng.choice(("", " ", "\n  ", " # 1+\n"))
        after = self._rng.choice(("", " ", "\n  ", " # (2)*\n"))
        made = f"({before}{inside}{after})"
        return f"({made})" if self._rng.random() < 0.2 else made


def lark(rules: Rules) -> str:
    """Lark's notation. Names in capitals are terminals."""
    renamed = {"root": "start"}
    return "\n".join(f"{renamed.get(name, name)}: {_lark(node)}" for name, node in rules.items())


def _lark(node: Node) -> str:
    match node:
        case Literal(text):
            return f'"{"".join(_escaped(each, _OF_LITERALS) for each in text)}"'
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
