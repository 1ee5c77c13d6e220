"""Stop strings in streamed text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router_svc.request.stop_strings import StopScanner


def scan(text: str, stops: list[str], cuts: list[int], *, include: bool = False) -> tuple[str, str | None]:
    """The visible part of `text` when it arrives in chunks that end at `cuts`, and the stop string found."""
    scanner = StopScanner(stops, include=include)
    shown, start = "", 0
    for end in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        scanned = scanner.push(text[start:end])
        shown, start = shown + scanned.text, end
        if scanned.matched is not None:
            return shown, scanned.matched
    return shown + scanner.flush(), None


def expected(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first wins, and the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


short_text = st.text(alphabet="ab", max_size=30)
some_stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(short_text, some_stops, st.lists(st.integers(0, 30)), st.booleans())
def test_the_outcome_matches_the_definition_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    assert scan(text, stops, cuts, include=include) == expected(text, stops, include=include)


@given(short_text, some_stops, st.lists(st.integers(0, 30)))
def test_text_that_may_still_become_a_stop_string_is_held_back(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    shown, start = "", 0
    for end in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        scanned = scanner.push(text[start:end])
        shown, start = shown + scanned.text, end
        if scanned.matched is not None:
            return
        held = text[len(shown) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(
            text[:end].endswith(stop[:size]) and size > len(held) for stop in stops for size in range(len(stop))
        )


@given(short_text, short_text, some_stops, st.lists(st.integers(0, 30)), st.booleans())
def test_stop_strings_that_may_not_end_the_text_are_passed_over(
    head: str, tail: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    scanner = StopScanner(stops, include=include)
    shown = "".join(
        scanner.push(head[start:end], may_end=False).text
        for start, end in pairwise([0, *sorted(cut for cut in cuts if cut < len(head)), len(head)])
    )
    scanned = scanner.push(tail)
    shown += scanned.text + ("" if scanned.matched else scanner.flush())
    text = head + tail
    for end in range(len(head) + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            assert (shown, scanned.matched) == (text[: end if include else end - len(stop)], stop)
            return
    assert (shown, scanned.matched) == (text, None)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopScanner([]).push("all of it").text == "all of it"


def test_text_held_back_appears_once_it_cannot_match() -> None:
    scanner = StopScanner(["###"])
    assert scanner.push("a ##").text == "a "
    assert scanner.push("b").text == "##b"
