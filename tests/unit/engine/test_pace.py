from __future__ import annotations

import pytest

from pdserve.engine.pace import Pace, PaceMeter


def test_the_first_step_of_a_kind_takes_the_place_of_the_default() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=0, num_prefill_tokens=100, step_s=0.05)
    assert meter.pace == Pace(prefill_token_s=0.0005)
    meter.observe(num_decoding=3, num_prefill_tokens=0, step_s=0.006)
    assert meter.pace == Pace(decode_step_s=0.006, prefill_token_s=0.0005)


def test_a_shared_step_costs_its_prefill_what_decoding_alone_would_not_have_taken() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=1, num_prefill_tokens=0, step_s=0.005)
    meter.observe(num_decoding=1, num_prefill_tokens=45, step_s=0.050)
    assert meter.pace.decode_step_s == 0.005
    assert meter.pace.prefill_token_s == pytest.approx(0.001)


def test_a_step_quicker_than_decoding_alone_does_not_make_prefill_free() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=1, num_prefill_tokens=0, step_s=0.005)
    meter.observe(num_decoding=1, num_prefill_tokens=4, step_s=0.004)
    assert meter.pace.prefill_token_s == pytest.approx(0.0001)


def test_the_averages_follow_a_lasting_change_and_hardly_a_single_step() -> None:
    meter = PaceMeter()
    for step_s in (*[0.005] * 10, 0.05):
        meter.observe(num_decoding=1, num_prefill_tokens=0, step_s=step_s)
    assert meter.pace.decode_step_s < 0.02
    for _ in range(20):
        meter.observe(num_decoding=1, num_prefill_tokens=0, step_s=0.05)
    assert meter.pace.decode_step_s == pytest.approx(0.05, rel=0.05)


def test_short_prefills_say_little_about_the_cost_of_a_token() -> None:
    meter = PaceMeter()
    for _ in range(5):
        meter.observe(num_decoding=0, num_prefill_tokens=1024, step_s=0.6)
    for _ in range(5):
        meter.observe(num_decoding=0, num_prefill_tokens=6, step_s=0.015)
    assert meter.pace.prefill_token_s == pytest.approx(0.0006, rel=0.1)


def test_a_step_that_computed_nothing_teaches_nothing() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=0, num_prefill_tokens=0, step_s=3.0)
    assert meter.pace == Pace()


@pytest.mark.parametrize(
    ("decode_step_s", "tokens"),
    [(0.005, 45), (0.030, 20), (0.040, 20), (0.050, 25), (0.150, 75)],
)
def test_prefill_gets_what_decoding_leaves_of_the_budget_or_half_of_what_decoding_takes(
    decode_step_s: float, tokens: int
) -> None:
    pace = Pace(decode_step_s=decode_step_s, prefill_token_s=0.001)
    assert pace.tokens_within(0.050 + 1e-9) == tokens


def test_beside_decoding_a_worker_prefills_in_what_steps_leave() -> None:
    pace = Pace(decode_step_s=0.020, prefill_token_s=0.001)
    assert pace.prefill_tokens_per_s() == pytest.approx(1000)
    assert pace.prefill_tokens_per_s(0.050) == pytest.approx(600)
    assert pace.prefill_tokens_per_s(0.010) == pytest.approx(1000 / 3)
