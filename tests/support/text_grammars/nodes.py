"""Grammars over characters: which texts match, by the definition, and random texts that do. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: What texts consist of: letters, digits, what notations have to escape, and characters of several bytes.
ALPHABET = "abcXYZ019 _-^]\\\"'/[&~.|*()\n\t\x7fé😀"
#: Characters that a negated class, or any character, may be, in random texts.
_MORE = "!\x7f\rüß中"


class NoText(Exception):
    """Nothing of the length that is left matches."""


@dataclass(frozen=True, slots=True)
class Literal:
    """One text."""

    text: str


@dataclass(frozen=True, slots=True)
class Class:
    """One character of `ranges`, each from the first to the last one, or one that is in none of them."""

    ranges: tuple[tuple[str, str], ...]
    is_negated: bool

    def has(self, character: str) -> bool:
        """Whether this character matches."""
        return any(first <= character <= last for first, last in self.ranges) != self.is_negated


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`minimum` times to `maximum` times; `maximum` None: any number."""

    item: Node
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What the rule of this name matches."""

    name: str


Node = Literal | Class | Chain | Choice | Repeat | Rule
Rules = Mapping[str, Node]


def matches(rules: Rules, text: str) -> bool:
    """Whether the rule `root` matches the whole text. A rule that contains itself has to consume something before."""
    return len(text) in _Recognizer(rules, text).ends(rules["root"], 0)


class _Recognizer:
    def __init__(self, rules: Rules, text: str) -> None:
        self._rules = rules
        self._text = text
        self._found: dict[tuple[Node, int], frozenset[int]] = {}

    def ends(self, node: Node, start: int) -> frozenset[int]:
        """Where a match of `node` from `start` on may end."""
        key = (node, start)
        if key not in self._found:
            self._found[key] = frozenset(self._ends(node, start))
        return self._found[key]

    def _ends(self, node: Node, start: int) -> set[int]:
        match node:
            case Literal(text):
                return {start + len(text)} if self._text.startswith(text, start) else set()
            case Class():
                return {start + 1} if start < len(self._text) and node.has(self._text[start]) else set()
            case Chain(items):
                return self._behind(items, {start})
            case Choice(items):
                return {end for item in items for end in self.ends(item, start)}
            case Rule(name):
                return {*self.ends(self._rules[name], start)}
            case Repeat(item, minimum, maximum):
                return self._repeated(item, start, minimum, maximum)

    def _behind(self, items: Sequence[Node], starts: set[int]) -> set[int]:
        for item in items:
            starts = {end for start in starts for end in self.ends(item, start)}
        return starts

    def _repeated(self, item: Node, start: int, minimum: int, maximum: int | None) -> set[int]:
        reached = self._behind([item] * minimum, {start})
        new, count = reached, minimum
        while new and (maximum is None or count < maximum):
            new = self._behind([item], new) - reached
            reached = reached | new
            count += 1
        return reached


def sample(rules: Rules, rng: random.Random, node: Node | None = None, depth: int = 0) -> str:
    """A text that matches. Raises `NoText` when the choices lead too deep."""
    if depth > 40:
        raise NoText
    match rules["root"] if node is None else node:
        case Literal(text):
            return text
        case Class() as one:
            return rng.choice([each for each in ALPHABET + _MORE if one.has(each)])
        case Chain(items):
            return "".join(sample(rules, rng, item, depth + 1) for item in items)
        case Choice(items):
            return sample(rules, rng, rng.choice(items), depth + 1)
        case Rule(name):
            return sample(rules, rng, rules[name], depth + 1)
        case Repeat(item, minimum, maximum):
            count = minimum + rng.randrange(3 if maximum is None else min(3, maximum - minimum + 1))
            return "".join(sample(rules, rng, item, depth + 1) for _ in range(count))


def changed(text: str, rng: random.Random) -> str:
    """A text that differs in a character or two."""
    for _ in range(rng.randrange(1, 3)):
        at, other = rng.randrange(len(text) + 1), rng.choice(ALPHABET + _MORE)
        text = rng.choice(
            (text[:at] + other + text[at:], text[:at] + text[at + 1 :], text[:at] + other + text[at + 1 :])
        )
    return text
