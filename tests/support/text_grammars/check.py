"""Compares grammars of texts with their definition: `python -m tests.support.text_grammars.check`."""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from pdserve.base.errors import RequestError
from pdserve.model.grammar import Grammar, GrammarFailed
from pdserve.model.grammar_check import GAVE_UP
from router_svc.api.openai.schema import CompletionBody
from router_svc.api.parse import parse_body
from router_svc.api.structured import grammar_of
from tests.support.json_schemas.texts import Texts
from tests.support.text_grammars.generator import Generator
from tests.support.text_grammars.nodes import NoText, Rules, changed, matches, sample
from tests.support.text_grammars.notations import choice, expression, gbnf, lark

_VALID, _TRIES, _CHANGES, _WALKS = 5, 30, 5, 3
#: Kinds of grammars: the field, how it is written, and which ones are made.
KINDS: dict[str, tuple[str, Callable[[Rules], object], Callable[[Generator], Rules]]] = {
    "choice": ("choice", choice, Generator.texts),
    "regex": ("regex", lambda rules: expression(rules["TEXT"]), Generator.regular),
    "GBNF": ("grammar", gbnf, Generator.regular),
    "Lark": ("grammar", lark, Generator.regular),
    "GBNF, nested": ("grammar", gbnf, Generator.nested),
    "Lark, nested": ("grammar", lark, Generator.nested),
    "GBNF, ambiguous": ("grammar", gbnf, Generator.ambiguous),
    "Lark, ambiguous": ("grammar", lark, Generator.ambiguous),
}


class Check:
    """Compares grammars of one kind, and counts."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._texts = Texts()
        self.counts: Counter[str] = Counter()
        #: What was wrong, with the grammar and the text.
        self.wrong: list[str] = []

    def compare(self, seeds: Iterable[int]) -> None:
        """What matches is accepted, unless the grammar is ambiguous; what does not match never is."""
        name, written, made = KINDS[self._kind]
        for seed in seeds:
            rules, rng = made(Generator(f"{self._kind} {seed}")), random.Random(seed)
            text = written(rules)
            self.counts["grammars"] += 1
            body = {"model": "m", "prompt": "x", "structured_outputs": {name: text}}
            try:
                fields = parse_body(CompletionBody, json.dumps(body).encode())
                grammar = self._texts.vocabulary.compile(grammar_of(fields))
            except RequestError as error:
                if GAVE_UP in str(error):
                    self.counts["grammars given up"] += 1
                else:
                    self._note("refused", text, str(error))
                continue
            self._compare(rules, text, grammar, rng)

    def _compare(self, rules: Rules, text: object, grammar: Grammar, rng: random.Random) -> None:
        for valid in _samples(rules, rng):
            for tried in (valid, *(changed(valid, rng) for _ in range(_CHANGES))):
                expected, accepted = matches(rules, tried), self._texts.accepts(grammar, tried)
                assert expected or tried != valid, (text, valid)
                if self._kind == "regex":
                    assert expected == (re.fullmatch(str(text), tried) is not None), (text, tried)
                self.counts["valid texts" if expected else "invalid texts"] += 1
                if accepted and not expected:
                    self._note("invalid text accepted", text, tried)
                elif expected and not accepted:
                    self.counts["valid texts not accepted"] += 1
                    if "ambiguous" not in self._kind:
                        self._note("valid text not accepted", text, tried)
        for _ in range(_WALKS):
            try:
                walked = self._texts.walk(grammar, rng)
            except GrammarFailed:  # It has too many readings of one text.
                assert "ambiguous" in self._kind, text
                self.counts["walks given up"] += 1
                continue
            if walked is not None:
                self.counts["walks"] += 1
                if not matches(rules, walked):
                    self._note("walk not valid", text, walked)

    def _note(self, what: str, text: object, found: str) -> None:
        self.wrong.append(f"{what}: {text!r} {found!r}")


def _samples(rules: Rules, rng: random.Random) -> list[str]:
    found: list[str] = []
    for _ in range(_TRIES):
        with suppress(NoText):
            found.append(sample(rules, rng))
    return found[:_VALID]


def main() -> None:
    """Compares many grammars of each kind, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grammars", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    for kind in KINDS:
        started = time.monotonic()
        check = Check(kind)
        check.compare(range(arguments.first_seed, arguments.first_seed + arguments.grammars))
        print(f"{kind}, {time.monotonic() - started:.0f} s: {dict(check.counts)}", *check.wrong[:5], sep="\n")


if __name__ == "__main__":
    main()
