"""The ids of events: what a client has, and what follows."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import RequestError
from pdserve.base.sampling import FinishReason
from router_svc.api.event_ids import NOTHING, SCHEMA, EventIds, Seen, parse_event_id
from router_svc.request.output import ChoiceDelta

NAME = "9f3c01aa"
#: What the OpenAPI document says of ids.
PATTERN = str(SCHEMA["pattern"])


def delta(choice: int, tokens: int = 1, *, ends: bool = False) -> ChoiceDelta:
    finish = FinishReason.STOP if ends else None
    return ChoiceDelta(choice_index=choice, text="x", token_ids=(7,) * tokens, finish_reason=finish)


def text_of(event_id: str | None) -> str:
    assert event_id is not None
    assert re.fullmatch(r"[0-9a-z.-]+", event_id)
    return event_id


def test_ids_count_tokens_and_join_choices_that_are_alike() -> None:
    ids = EventIds(NAME, 4)
    assert text_of(ids.opening(2)) == f"{NAME}-o2"
    assert text_of(ids.after(delta(0))) == f"{NAME}-1.0x3"
    for choice in (1, 2, 3):
        last = ids.after(delta(choice, ends=choice == 3))
    assert text_of(last) == f"{NAME}-1x3.1e"
    assert text_of(ids.usage()) == f"{NAME}-u"
    assert text_of(ids.done()) == f"{NAME}-d"
    assert text_of(EventIds(NAME, 1).after(delta(0, 5))) == f"{NAME}-5"


def test_events_have_ids_once_the_stream_can_be_resumed_and_from_then_on() -> None:
    can_be_resumed = False
    ids = EventIds(NAME, 1, can_be_resumed=lambda: can_be_resumed)
    assert (ids.opening(0), ids.after(delta(0))) == ("", "")
    can_be_resumed = True
    assert ids.after(delta(0)) == f"{NAME}-2"
    # Else the client would get again what came without an id.
    can_be_resumed = False
    assert (ids.after(delta(0)), ids.done()) == (f"{NAME}-3", f"{NAME}-d")


@st.composite
def outputs(draw: st.DrawFn) -> tuple[int, list[ChoiceDelta]]:
    """Choices of different lengths whose tokens take turns in any order, each with one end, with or without a token."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    order = [choice for choice, length in enumerate(lengths) for _ in range(length)]
    random.Random(draw(st.integers(0, 2**16))).shuffle(order)
    left = dict(enumerate(lengths))
    deltas = []
    for choice in order:
        left[choice] -= 1
        if left[choice]:
            deltas.append(delta(choice))
        elif draw(st.booleans()):
            deltas.append(delta(choice, ends=True))
        else:
            deltas += [delta(choice), delta(choice, 0, ends=True)]
    return len(lengths), deltas


@given(outputs(), st.data())
def test_after_any_event_exactly_the_others_follow_in_any_order(
    output: tuple[int, list[ChoiceDelta]], data: st.DataObject
) -> None:
    """Also when the choices take turns in another way, as they may on another router."""
    num_choices, deltas = output
    first = EventIds(NAME, num_choices)
    sent = [text_of(first.after(each)) for each in deltas]
    cut = data.draw(st.integers(1, len(deltas)))
    # Another order that keeps that of each choice.
    again = [(index, each) for index, each in enumerate(deltas)]
    again.sort(key=lambda each: (data.draw(st.integers(0, 1)), each[1].choice_index, each[0]))
    by_choice = {choice: [e for e in enumerate(deltas) if e[1].choice_index == choice] for choice in range(num_choices)}
    second = EventIds(NAME, num_choices, parse_event_id(sent[cut - 1]))
    shown = []
    for _, each in again:
        index, own = by_choice[each.choice_index].pop(0)
        if second.after(own) is not None:
            shown.append(index)
    assert sorted(shown) == list(range(cut, len(deltas)))


@given(outputs(), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2**16)), max_size=4))
def test_a_stream_that_is_resumed_again_and_again_has_each_event_once(
    output: tuple[int, list[ChoiceDelta]], breaks: list[tuple[int, int]]
) -> None:
    """Each router passes the choices on in another order. Fails when an id forgets what another had passed on."""
    num_choices, deltas = output
    shown, last = list[tuple[int, int]](), ""
    for limit, order in [*breaks, (len(deltas), 0)]:
        ids = EventIds(NAME, num_choices, parse_event_id(last))
        turns = [each.choice_index for each in deltas]
        random.Random(order).shuffle(turns)
        own = {choice: [each for each in deltas if each.choice_index == choice] for choice in range(num_choices)}
        num_shown, positions = 0, [0] * num_choices
        for choice in turns:
            event_id = ids.after(own[choice][positions[choice]])
            positions[choice] += 1
            if event_id is not None:
                last = event_id
                shown.append((choice, positions[choice]))
                num_shown += 1
            if num_shown == limit:
                break
    assert sorted(shown) == sorted((choice, 1 + at) for choice in own for at in range(len(own[choice])))


def test_openings_usage_and_end_are_skipped_when_the_client_has_them() -> None:
    def left(last: str) -> list[bool]:
        ids = EventIds(NAME, 2, parse_event_id(last))
        return [
            line is not None for line in (ids.opening(0), ids.opening(1), ids.after(delta(0)), ids.usage(), ids.done())
        ]

    assert left("") == [True] * 5
    assert left(f"{NAME}-o0") == [False, True, True, True, True]
    assert left(f"{NAME}-0x2") == [False, False, True, True, True]
    assert left(f"{NAME}-1.0") == [False, False, False, True, True]
    assert left(f"{NAME}-u") == [False, False, False, False, True]
    assert left(f"{NAME}-d") == [False] * 5


@pytest.mark.parametrize(
    "text",
    [
        "57",
        f"{NAME}-",
        f"{NAME}-57x",
        f"{NAME}-e",
        f"{NAME}-1..2",
        f"{NAME}-1x9999",
        f"{NAME}-1x999.1x999",
        f"{NAME}-\u0661",
        f"{NAME}-1\n",
        f"{NAME.upper()}-1",
        f"{NAME}-" + "1." * 5000 + "1",
        "id: 1",
    ],
)
def test_other_texts_are_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(RequestError, match="Last-Event-ID") as raised:
        parse_event_id(text)
    assert raised.value.param == "Last-Event-ID"


@given(st.text() | st.from_regex(r"[0-9a-f]{8}-[0-9ex.oud]{1,40}", fullmatch=True))
def test_any_text_is_an_id_or_refused(text: str) -> None:
    try:
        seen = parse_event_id(text)
    except RequestError:
        return
    assert isinstance(seen, Seen)
    assert re.fullmatch(PATTERN, text)
    assert seen == NOTHING or len(seen.name) == 8


def test_an_id_of_a_response_with_other_choices_is_refused() -> None:
    with pytest.raises(RequestError, match="has 2 choices, but the stream has 1"):
        EventIds(NAME, 1, parse_event_id(f"{NAME}-1x2"))
