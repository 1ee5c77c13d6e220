"""Labels of a tokenizer, and answers from log-probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pdserve.base.errors import RequestError
from router_svc.api.decisions.answers import answer_of
from router_svc.api.decisions.labels import Label, Labels, ModelLabels
from router_svc.api.decisions.schema import Choice, Predicate, Score
from router_svc.api.served_model import ServedModel
from tests.support.tiny_model import NAME, write_model

PREDICATE = Predicate(type="predicate", instructions="?")


def choice(number: int) -> Choice:
    return Choice.model_validate(
        {"type": "choice", "instructions": "?", "choices": [{"value": f"v{index}"} for index in range(number)]}
    )


async def labels_of(tmp_path: Path, merges: Sequence[str], end: str = ":") -> Labels:
    """The labels of the tiny model with merges of its tokens, whose prompts end with a text."""
    directory = write_model(tmp_path / NAME)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    for merge in merges:
        tokenizer["model"]["merges"].append(merge.split(" "))
        tokenizer["model"]["vocab"][merge.replace(" ", "")] = len(tokenizer["model"]["vocab"]) + 2
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    assert Tokenizer.from_file(str(path))
    template = directory / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}" + end, encoding="utf-8")
    model = ServedModel.load(directory, NAME)
    try:
        return await ModelLabels(model).find({})
    finally:
        model.close()


async def test_letters_come_first_and_pairs_only_if_they_are_one_token(tmp_path: Path) -> None:
    labels = await labels_of(tmp_path, ["A C", "Z Z"])
    texts = [label.text for label in labels.letters]
    assert texts == [*"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", "AC", "ZZ"]
    assert len({label.token_ids for label in labels.letters}) == len(texts)
    assert [label.text for label in labels.digits] == [*"0123456789"]
    assert [label.text for label in labels.of(choice(54), 0)] == texts
    with pytest.raises(RequestError, match=r"55 possible answers.* leave 54 answers") as refused:
        labels.of(choice(55), 7)
    assert refused.value.param == "questions[7].choices"


async def test_a_label_that_changes_the_end_of_the_prompt_is_none(tmp_path: Path) -> None:
    labels = await labels_of(tmp_path, ["x A", "x y", "x Y"], end="x")
    assert labels.letters[0].text == "B"
    assert labels.truth == ()
    with pytest.raises(RequestError, match=r"2 possible answers.* leave 0"):
        labels.of(PREDICATE, 0)


async def test_both_spellings_of_yes_and_no_count(tmp_path: Path) -> None:
    labels = await labels_of(tmp_path, ["y e", "ye s"])
    yes, no = labels.of(PREDICATE, 0)
    assert (yes.text, no.text) == ("yes", "no")
    assert yes.token_ids[1:] == (ord("Y"),)
    assert yes.token_ids[0] > 257
    assert no.token_ids == (ord("n"), ord("N"))


def test_answers_are_valid_for_any_log_probabilities() -> None:
    labels = [Label(text=each, token_ids=(index,)) for index, each in enumerate("AB")]
    score = Score.model_validate({"type": "score", "instructions": "?", "levels": [{"label": "a"}, {"label": "b"}]})
    for given, shares, mass in (
        ((-math.inf, -math.inf), (0.5, 0.5), 0.0),
        ((-math.inf, 0.0), (0.0, 1.0), 1.0),
        ((-2000.0, -2000.0), (0.5, 0.5), 0.0),
        ((-1e-17, -45.0), (1.0, 0.0), 1.0),
    ):
        for question in (PREDICATE, choice(2), score):
            answer = answer_of(question, labels, dict(enumerate(given)))
            assert [each["probability"] for each in answer["probabilities"]] == pytest.approx(shares)
            assert answer["label_mass"] == pytest.approx(mass)
            assert 0 <= answer["label_mass"] <= 1
            json.dumps(answer, allow_nan=False)
