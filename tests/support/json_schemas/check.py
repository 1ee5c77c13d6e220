"""Compares the grammar of a schema with the `jsonschema` library: `python -m tests.support.json_schemas.check`."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from pdserve.base.errors import RequestError
from pdserve.model.grammar import Grammar
from router_svc.api.json_grammars import Whitespace, json_grammar
from tests.support.json_schemas.generator import Generator, Schema
from tests.support.json_schemas.instances import as_text, instances
from tests.support.json_schemas.oracle import Oracle
from tests.support.json_schemas.texts import Texts, changed, spellings

PARAM = "schema"
_WALKS, _INSTANCES, _CHANGES = 5, 5, 12
#: Ways to write an instance that are documented.
_SPELLINGS: tuple[dict[str, Any], ...] = ({}, {"separators": (",", ":")}, {"indent": 2})


@dataclass(slots=True)
class Outcome:
    """What was compared, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    #: Refused schemas of the wide kind, by the message without names and numbers of the schema.
    refusals: Counter[str] = field(default_factory=Counter)
    #: Each with the seed, the schema and the text.
    wrong: list[str] = field(default_factory=list)


class Check:
    """Compares schemas, and counts in `outcome`."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._texts = Texts()

    def strict(self, seeds: Iterable[int]) -> None:
        """Schemas of OpenAI's strict subset: none is refused."""
        for seed in seeds:
            schema = Generator(seed, is_strict=True).schema()
            grammar = self._compiled(schema)
            if grammar is None:
                self._note("strict schema refused", seed, schema)
                continue
            self._compare(seed, schema, Oracle(schema), grammar)

    def wide(self, seeds: Iterable[int]) -> None:
        """Schemas with all keywords: they are enforced, or refused with a path."""
        for seed in seeds:
            schema = Generator(seed, is_strict=False).schema()
            try:
                oracle = Oracle(schema)
            except jsonschema.SchemaError:
                self.outcome.counts["no schema"] += 1
                continue
            grammar = self._compiled(schema)
            if grammar is not None:
                self._compare(seed, schema, oracle, grammar)

    def _compiled(self, schema: Schema) -> Grammar | None:
        self.outcome.counts["schemas"] += 1
        try:
            text = json_grammar(schema, Whitespace(), closes_objects=False, param=PARAM)
            return self._texts.vocabulary.compile(text)
        except RequestError as error:
            if not (error.param or "").startswith(PARAM):
                self._note("refused without a path", -1, schema, str(error))
            self.outcome.counts["refused"] += 1
            self.outcome.refusals[str(error).split(" cannot be enforced: ")[-1].split(":")[0]] += 1
            return None

    def _compare(self, seed: int, schema: Schema, oracle: Oracle, grammar: Grammar) -> None:
        rng = random.Random(f"texts of {seed}")
        values = []
        for value in instances(schema, rng, _INSTANCES):
            for spelling in _SPELLINGS:
                text = as_text(value, **spelling)
                self.outcome.counts["valid texts"] += 1
                if not self._texts.accepts(grammar, text):
                    self._note("valid text not accepted", seed, schema, text)
            values.append(json.loads(as_text(value)))
        self.outcome.counts["instances not found"] += _INSTANCES - len(values)
        for _ in range(_WALKS):
            text = self._texts.walk(grammar, rng)
            if text is None:
                self.outcome.counts["walks without an end"] += 1
                continue
            self.outcome.counts["walks"] += 1
            if not oracle.accepts(text):
                self._note("walk not valid", seed, schema, text)
            values.append(json.loads(text))
        for value in values:
            for _ in range(_CHANGES):
                for text in spellings(changed(value, rng), rng):
                    if oracle.accepts(text):
                        continue
                    self.outcome.counts["invalid texts"] += 1
                    if self._texts.accepts(grammar, text):
                        self._note("invalid text accepted", seed, schema, text)

    def _note(self, what: str, seed: int, schema: Schema, text: str = "") -> None:
        self.outcome.counts[what] += 1
        self.outcome.wrong.append(f"{what}, seed {seed}: {json.dumps(schema)} {text}")


def main() -> None:
    """Compares many schemas, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", type=int, default=1500)
    parser.add_argument("--wide", type=int, default=3000)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    for kind in ("strict", "wide"):
        check, started = Check(), time.monotonic()
        getattr(check, kind)(range(arguments.first_seed, arguments.first_seed + getattr(arguments, kind)))
        print(f"{kind}, {time.monotonic() - started:.0f} s: {dict(check.outcome.counts)}")
        print(*check.outcome.wrong[:10], *(f"  {n} {why}" for why, n in check.outcome.refusals.most_common()), sep="\n")


if __name__ == "__main__":
    main()
