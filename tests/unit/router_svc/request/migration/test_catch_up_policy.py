"""A worker that follows takes over when its tokens come nearly as early as those of the one that is left."""

from __future__ import annotations

import pytest

from router_svc.request.migration.catch_up_policy import CatchUpPolicy


def policy(num_tokens: int = 5, *, came_at: float = 0.0) -> CatchUpPolicy:
    """The client has one more token than the target was given."""
    target = CatchUpPolicy({0: num_tokens})
    target.came({0: num_tokens + 1}, came_at)
    return target


@pytest.mark.parametrize(
    ("next_index", "late_s", "takes_over"),
    [
        (7, 0.5, True),  # Its token is new.
        (6, 0.001, True),
        (6, 0.02, False),
        (5, 0.001, False),  # The client has one more.
    ],
)
def test_it_takes_over_when_it_is_hardly_later(next_index: int, late_s: float, takes_over: bool) -> None:
    assert policy().sampled({0: next_index}, {0: 6}, late_s) is takes_over


def test_all_choices_have_to_be_in_time() -> None:
    target = CatchUpPolicy({0: 5, 2: 3})
    target.came({0: 6, 2: 4}, 0.0)
    assert not target.sampled({0: 6}, {0: 6, 2: 4}, 0.001)
    assert target.sampled({2: 4}, {0: 6, 2: 4}, 0.002)


def test_a_choice_that_has_ended_is_not_waited_for() -> None:
    target = CatchUpPolicy({0: 5, 2: 3})
    target.came({0: 6, 2: 4}, 0.0)
    assert target.sampled({0: 6}, {0: 6}, 0.001)


def test_it_gets_less_choosy() -> None:
    """Steps of equal length meet, or do not."""
    target, tries = policy(0), 0
    for length in range(1, 100):
        target.came({0: length}, float(length))
        tries += 1
        if target.sampled({0: length}, {0: length}, length + 0.0128):
            break
    assert tries == 20


def test_a_target_that_stays_behind_takes_over_in_the_end() -> None:
    target, tries = policy(0), 0
    for length in range(2, 100):
        target.came({0: length}, float(length))
        tries += 1
        if target.sampled({0: length - 1}, {0: length}, float(length)):
            break
    assert tries == 40


def test_it_is_given_what_it_has_not_got_or_sampled() -> None:
    target = CatchUpPolicy({0: 5})
    assert target.give(0, 8) == 5
    assert target.give(0, 9) == 8
    target.sampled({0: 11}, {0: 9}, 0.0)
    assert target.give(0, 10) == 11
    assert target.give(0, 12) == 11


@pytest.mark.parametrize("source_s", [0.030, 0.037])
@pytest.mark.parametrize("phase", [0.1, 0.4, 0.9])
def test_a_pause_is_hardly_longer_than_a_step_of_the_target(source_s: float, phase: float) -> None:
    """Two workers with steps of their own length: each token of the source is passed on at once."""
    target_s = 0.033
    target, num_tokens, came_at, now = CatchUpPolicy({0: 1}), 1, 0.0, phase * target_s
    while True:
        given, now = num_tokens, now + target_s
        while came_at + source_s <= now:
            num_tokens, came_at = num_tokens + 1, came_at + source_s
            target.came({0: num_tokens}, came_at)
        if target.sampled({0: given + 1}, {0: num_tokens}, now):
            break
    last_at = came_at if num_tokens > given else now
    assert now + target_s - last_at <= target_s + 0.010
