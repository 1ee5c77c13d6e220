"""The detector of repetition, on answers that models really gave and on ordinary texts."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cli.repetition import Repetition, RepetitionDetector, find_repetition

SENTENCE = "The bee's home is a remarkable example of engineering and biomimicry. "


def feed(text: str, size: int = 4) -> tuple[Repetition | None, int]:
    """The first repetition noticed when `text` arrives in pieces of `size`, and the characters read by then."""
    detector = RepetitionDetector()
    for end in range(size, len(text) + size, size):
        if (repetition := detector.feed(text[end - size : end])) is not None:
            return repetition, end
    return None, len(text)


@pytest.mark.parametrize(
    "unit", ["il Coriobella, ", "la Tradition, la Culture, ", SENTENCE, "x", SENTENCE * 2 + "Yes. "]
)
def test_a_repeated_unit_is_noticed_and_named(unit: str) -> None:
    repetition, read = feed("An answer begins well: " + unit * (8000 // len(unit)))
    assert repetition is not None
    assert len(repetition.unit) == len(unit)
    assert repetition.unit in unit * 2
    assert repetition.count >= 4
    assert read < max(400, 4 * len(unit)) + len(unit) + 50


def test_line_breaks_between_the_repeats_do_not_hide_them() -> None:
    repetition, _ = feed("".join(SENTENCE + "\n\n" * (index % 3 == 0) for index in range(20)))
    assert repetition == Repetition(unit=SENTENCE, count=5)


def test_the_numbers_of_list_items_do_not_hide_a_repetition() -> None:
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
    repetition, _ = feed("".join(f"{index + 1:02}: {days[index % 7]}\n" for index in range(100)))
    assert repetition is not None
    assert set(repetition.unit.split()) == set(days)


def test_the_unit_starts_where_the_repetition_starts_but_not_within_a_word() -> None:
    assert find_repetition("The words:" + "one two three, " * 40) == Repetition(unit="one two three, ", count=40)
    assert find_repetition("Il Corio, " + "il Corio, " * 50) == Repetition(unit="Corio, il ", count=50)
    assert find_repetition("A number: 12" + "3" * 500) == Repetition(unit="3", count=500)


@pytest.mark.parametrize(
    "text",
    [
        "-" * 120 + "\n",
        "| --- " * 20 + "|\n",
        "\n" * 1000,
        "".join(f"{number}, " for number in range(1000)),
        "".join(f"{number}.\n" for number in range(1000)),
        "".join(f"{number}. The number {number} is next.\n" for number in range(60)),
        ("[" + "0, " * 9 + "0],\n") * 10,
        SENTENCE * 3 + "And that is all. " + SENTENCE * 3,
        "",
    ],
    ids=["rule", "table", "blank-lines", "counting", "numbers-alone", "numbered-list", "zeros", "refrain", "nothing"],
)
def test_ordinary_texts_are_no_repetition(text: str) -> None:
    assert feed(text) == (None, len(text))


def test_a_text_that_repeated_itself_and_then_went_on_is_no_repetition() -> None:
    assert find_repetition(SENTENCE * 10 + "At last it says something else.") is None


@settings(max_examples=200)
@given(
    start=st.text(string.ascii_lowercase + " ", max_size=200),
    unit=st.text(string.ascii_lowercase, min_size=1, max_size=120),
    piece=st.integers(1, 40),
)
def test_every_unit_is_noticed_however_the_text_arrives(start: str, unit: str, piece: int) -> None:
    repetition, read = feed(start + unit * (1200 // len(unit)), piece)
    assert repetition is not None
    assert len(unit) % len(repetition.unit) == 0
    assert read <= len(start) + max(400, 4 * len(unit)) + piece
