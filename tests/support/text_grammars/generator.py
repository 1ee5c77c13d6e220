"""Random grammars."""

from __future__ import annotations

import random

from tests.support.text_grammars.nodes import ALPHABET, Chain, Choice, Class, Literal, Node, Repeat, Rule, Rules

_RANGES = (("a", "c"), ("a", "z"), ("0", "9"), ("X", "Z"), ("é", "ü"), (" ", "~"), ("+", "-"), ("[", "^"), ("-", "/"))
_SEPARATORS = "()[]<>,;|"


class Generator:
    """Makes grammars from a seed."""

    def __init__(self, seed: object) -> None:
        self._rng = random.Random(str(seed))
        self._alphabet = ALPHABET
        self._ranges = _RANGES
        #: Rules that what is made may refer to.
        self._names: list[str] = []

    def texts(self) -> Rules:
        """Some texts, of which some begin with another one."""
        made = [self._literal(0).text for _ in range(self._rng.randrange(1, 12))]
        made += [text + self._rng.choice(made) for text in made if self._rng.random() < 0.4]
        return {"root": Choice(tuple(map(Literal, made)))}

    def regular(self) -> Rules:
        """A terminal."""
        return {"root": Rule("TEXT"), "TEXT": self._any(3)}

    def nested(self) -> Rules:
        """Lists of words and lists. No word has what separates them, so a text has one reading as terminals."""
        self._alphabet = "".join(each for each in ALPHABET if each not in _SEPARATORS)
        self._ranges = tuple(each for each in _RANGES if not any(each[0] <= sign <= each[1] for sign in _SEPARATORS))
        words = [f"WORD{number}" for number in range(self._rng.randrange(1, 4))]
        rules: dict[str, Node] = {word: Chain((self._literal(0), self._any(2))) for word in words}
        opening, separator, closing = self._rng.choice(("(,)", "[;]", "<|>"))
        item = Choice((*map(Rule, words), Rule("list")))
        more = Repeat(Chain((Literal(separator), Rule("item"))), 0, self._rng.choice((None, 1, 2)))
        inside = Repeat(Chain((Rule("item"), more)), self._rng.randrange(2), 1)
        made = Chain((Literal(opening), inside, Literal(closing)))
        return {"root": Rule(self._rng.choice(("list", "item"))), "item": item, "list": made, **rules}

    def ambiguous(self) -> Rules:
        """Rules that refer to each other and, between brackets, to themselves, whatever their terminals share."""
        rules: dict[str, Node] = {}
        for number in range(self._rng.randrange(1, 4)):
            name = f"rule{number}"
            node = self._any(2)
            if self._rng.random() < 0.6:
                opening, closing = self._rng.choice(("()", "[]", ("<b>", "</b>")))
                inside = Chain((Literal(opening), Rule(name), Literal(closing)))
                node = Choice((node, inside))
            rules[name] = node
            self._names.append(name)
        return {"root": self._any(2), **rules}

    def _any(self, depth: int) -> Node:
        makers = [self._literal, self._class]
        if self._names:
            makers.append(self._rule)
        if depth > 0:
            makers += [self._sequence, self._sequence, self._choice, self._repeat]
        return self._rng.choice(makers)(depth)

    def _literal(self, _depth: int) -> Literal:
        return Literal("".join(self._rng.choice(self._alphabet) for _ in range(self._rng.randrange(1, 5))))

    def _class(self, _depth: int) -> Node:
        ranges = [(each, each) for each in self._rng.sample(self._alphabet, self._rng.randrange(3))]
        ranges += self._rng.sample(self._ranges, self._rng.randrange(1, 3))
        return Class(tuple(ranges), self._alphabet == ALPHABET and self._rng.random() < 0.2)

    def _rule(self, _depth: int) -> Node:
        return Rule(self._rng.choice(self._names))

    def _sequence(self, depth: int) -> Node:
        return Chain(tuple(self._any(depth - 1) for _ in range(self._rng.randrange(2, 4))))

    def _choice(self, depth: int) -> Node:
        return Choice(tuple(self._any(depth - 1) for _ in range(self._rng.randrange(2, 4))))

    def _repeat(self, depth: int) -> Node:
        minimum, maximum = self._rng.choice(((0, None), (1, None), (0, 1), (2, 2), (1, 3), (0, 2), (2, None)))
        return Repeat(self._any(depth - 1), minimum, maximum)
