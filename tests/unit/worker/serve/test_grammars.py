"""Grammars are read once, beside the event loop, and a tokenizer that cannot be read takes only them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from llguidance import LLMatcher

from pdserve.base.errors import RequestError, SetupError
from pdserve.base.sampling import SamplingParams
from pdserve.model import vocabularies as vocabularies_module
from pdserve.worker.serve import grammars as grammars_module
from pdserve.worker.serve.grammars import Grammars
from tests.support.tiny_model import NAME, write_model
from tests.unit.model.vocabularies import byte_level

WAIT_S = 20.0
WORDS = LLMatcher.grammar_from_regex("[a-z ]+")


def of(grammar: str) -> SamplingParams:
    return SamplingParams(grammar=grammar)


@pytest.fixture
async def grammars(tmp_path: Path) -> AsyncIterator[Grammars]:
    with closing(Grammars(write_model(tmp_path / NAME))) as grammars:
        yield grammars


async def test_a_grammar_is_read_once_and_no_text_is_none(grammars: Grammars) -> None:
    first, second, other = await asyncio.gather(
        grammars.get(of(WORDS)), grammars.get(of(WORDS)), grammars.get(of(LLMatcher.grammar_from_regex("x")))
    )
    assert first is not None
    assert first is second
    assert other is not first
    assert await grammars.get(of("")) is None


@pytest.mark.parametrize(("limit", "value"), [("_MAX_KEPT", 2), ("_MAX_KEPT_CHARACTERS", 2 * len(WORDS))])
async def test_those_used_last_are_kept(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(grammars_module, limit, value)
    first = await grammars.get(of(WORDS))
    assert await grammars.get(of(WORDS)) is first
    for text in ("a", "b"):
        await grammars.get(of(LLMatcher.grammar_from_regex(text * 6)))
    assert await grammars.get(of(WORDS)) is not first


async def test_one_that_is_not_valid_fails_its_requests_alone(grammars: Grammars) -> None:
    for _ in range(2):
        with pytest.raises(RequestError):
            await grammars.get(of("nothing"))
    assert await grammars.get(of(WORDS)) is not None


@pytest.mark.parametrize("wrong", ["missing", "no end", "broken"])
async def test_a_worker_serves_although_its_tokenizer_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    model = write_model(tmp_path / NAME)
    if wrong == "missing":
        (model / "tokenizer.json").unlink()
    elif wrong == "no end":
        byte_level().save(str(model / "tokenizer.json"))
        monkeypatch.setattr("pdserve.model.tokenizer_file.end_of_text_ids", lambda *_: ())
    else:
        monkeypatch.setattr(vocabularies_module, "GrammarVocabulary", None)
    grammars = Grammars(model)
    assert grammars.are_available
    async with asyncio.timeout(WAIT_S):
        await grammars.read_vocabulary()  # An error here would end the worker.
        assert not grammars.are_available
        with pytest.raises((SetupError, TypeError)):
            await grammars.get(of(WORDS))
