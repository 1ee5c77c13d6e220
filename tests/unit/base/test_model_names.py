"""Names and aliases of several models in settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.base.model_names import models_by_alias, models_by_name

A, B = Path("/models/a"), Path("/models/b")


def test_models_have_the_given_names_or_those_of_their_directories() -> None:
    assert models_by_name([A, B], []) == {"a": A, "b": B}
    assert models_by_name([A, B], ["org/x", "y"]) == {"org/x": A, "y": B}
    assert [*models_by_name([B, A], [])] == ["b", "a"]


@pytest.mark.parametrize(
    ("directories", "names", "needle"),
    [
        ([], [], "There is no model"),
        ([A, B], ["x"], "There are 2 models, but --served-model-name is given 1 times"),
        ([A, Path("/other/a")], [], "Two models have the name 'a': /models/a and /other/a"),
        ([A, B], ["x", "x"], "Two models have the name 'x'"),
    ],
)
def test_names_that_do_not_fit_are_refused(directories: list[Path], names: list[str], needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        models_by_name(directories, names)


def test_an_alias_may_have_any_free_name() -> None:
    assert models_by_alias(["gpt-4o=a", "x=org/b=c", "gpt-4o=a"], ["a", "org/b=c"]) == {"gpt-4o": "a", "x": "org/b=c"}


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("gpt-4o", "is not of the form NAME=MODEL"),
        ("=a", "is not of the form NAME=MODEL"),
        ("x=", "is not of the form NAME=MODEL"),
        ("x=c", "there is no model 'c'. The models are: a, b"),
        ("b=a", "the name 'b' already belongs to another model"),
        ("taken=b", "the name 'taken' already belongs to another model"),
    ],
)
def test_an_alias_that_cannot_be_one_is_refused(text: str, needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        models_by_alias(["taken=a", text], ["a", "b"])
