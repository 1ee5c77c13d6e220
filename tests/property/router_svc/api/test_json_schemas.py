"""Grammars of random JSON schemas accept what the `jsonschema` library accepts, and nothing else.

The full depth has 1,500 schemas of OpenAI's strict subset and 3,000 with all keywords; `make test` has the first of
each. `python -m tests.support.json_schemas.check` prints the counts.
"""

from __future__ import annotations

import random

import pytest

from pdserve.base.errors import RequestError
from pdserve.model.grammar import Grammar
from router_svc.api.json_grammars import Whitespace, json_grammar
from tests.support.depth import IS_FULL
from tests.support.json_schemas.bounds import narrow_bounds, numbers_near
from tests.support.json_schemas.check import Check
from tests.support.json_schemas.keywords import CASES, Case, published, table
from tests.support.json_schemas.oracle import Oracle
from tests.support.json_schemas.texts import Texts

#: Schemas of a test, and how many tests there are.
STRICT, WIDE, SLICES = (150, 300, 10) if IS_FULL else (6, 30, 1)


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


def seeds(number: int, count: int) -> range:
    return range(number * count, (number + 1) * count)


@pytest.mark.parametrize("number", range(SLICES))
def test_the_strict_subset_is_enforced_and_never_refused(number: int) -> None:
    check = Check()
    check.strict(seeds(number, STRICT))
    assert check.outcome.wrong == []
    assert check.outcome.counts["valid texts"] > 14 * STRICT
    assert check.outcome.counts["walks"] > STRICT
    assert check.outcome.counts["invalid texts"] > 100 * STRICT


@pytest.mark.parametrize("number", range(SLICES))
def test_all_keywords_are_enforced_or_refused(number: int) -> None:
    check = Check()
    check.wide(seeds(number, WIDE))
    assert check.outcome.wrong == []
    assert check.outcome.counts["valid texts"] > 10 * WIDE
    assert check.outcome.counts["walks"] > WIDE
    assert check.outcome.counts["invalid texts"] > 10 * WIDE
    # Most schemas are enforced: a generator whose schemas are refused would show nothing.
    assert check.outcome.counts["refused"] < WIDE // 3


@pytest.mark.parametrize("number", range(SLICES))
def test_bounds_that_are_close_to_each_other_are_enforced(texts: Texts, number: int) -> None:
    """Those with an excluded integer let it pass, before the schema was put into other words."""
    for seed in seeds(number, 300):
        schema = narrow_bounds(random.Random(seed))
        try:
            text = json_grammar(schema, Whitespace(), closes_objects=False, param="schema")
        except RequestError:
            continue  # Nothing is between them.
        grammar, oracle = texts.vocabulary.compile(text), Oracle(schema)
        for tried in (*numbers_near(schema), texts.walk(grammar, random.Random(seed)) or "null"):
            assert oracle.accepts(tried) or not texts.accepts(grammar, tried), (schema, tried)


def test_the_published_table_of_keywords_is_that_of_the_code() -> None:
    assert published() == table(), "run python -m tests.support.json_schemas.keywords"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.keyword} {case.what}")
def test_what_the_table_says_is_so(case: Case, texts: Texts) -> None:
    refused = case.refusal()
    if refused is not None:
        names = case.keyword.replace("`", "").split(", ")
        assert refused.param is not None
        assert refused.param.startswith("schema.properties.v.")
        assert refused.param.removeprefix("schema.properties.v.") in (*names, "properties")
        assert refused.param in str(refused)
        return
    grammar: Grammar = texts.vocabulary.compile(case.grammar())
    root = {"properties": {"v": case.schema}}
    for text in case.good:
        assert texts.accepts(grammar, f'{{"v": {text}}}'), text
        assert Oracle(root).accepts(f'{{"v": {text}}}'), text
    for text in case.bad:
        assert not texts.accepts(grammar, f'{{"v": {text}}}'), text
    assert case.good
    assert case.bad
