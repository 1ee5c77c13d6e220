"""The measured pace of steps, and the prefill budgets that follow from it."""

from __future__ import annotations

import pytest

from pdserve.engine.pace import Pace, PaceMeter


def test_the_first_step_of_a_kind_replaces_the_default() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=0, num_prefill_tokens=100, step_s=0.05)
    assert meter.pace == Pace(prefill_token_s=0.0005)
    meter.observe(num_decoding=3, num_prefill_tokens=0, step_s=0.006)
    pace = meter.pace
    assert (pace.decode_step_s, pace.decode_rows, pace.prefill_token_s) == (0.006, 3, 0.0005)


def test_the_time_of_a_shared_step_beyond_decoding_is_the_prefills() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=1, num_prefill_tokens=0, step_s=0.005)
    meter.observe(num_decoding=1, num_prefill_tokens=45, step_s=0.050)
    assert meter.pace.decode_step_s == 0.005
    assert meter.pace.prefill_token_s == pytest.approx(0.001)


def test_prefill_is_never_free_even_if_a_step_is_faster_than_decoding_alone() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=1, num_prefill_tokens=0, step_s=0.005)
    meter.observe(num_decoding=1, num_prefill_tokens=4, step_s=0.004)
    assert meter.pace.prefill_token_s == pytest.approx(0.0001)


def test_averages_follow_a_lasting_change_but_hardly_a_single_step() -> None:
    meter = PaceMeter()
    for step_s in (*[0.005] * 10, 0.05):
        meter.observe(num_decoding=1, num_prefill_tokens=0, step_s=step_s)
    assert meter.pace.decode_step_s < 0.02
    for _ in range(20):
        meter.observe(num_decoding=1, num_prefill_tokens=0, step_s=0.05)
    assert meter.pace.decode_step_s == pytest.approx(0.05, rel=0.05)


def test_short_prefills_have_little_weight() -> None:
    meter = PaceMeter()
    for _ in range(5):
        meter.observe(num_decoding=0, num_prefill_tokens=1024, step_s=0.6)
    for _ in range(5):
        meter.observe(num_decoding=0, num_prefill_tokens=6, step_s=0.015)
    assert meter.pace.prefill_token_s == pytest.approx(0.0006, rel=0.1)


def test_sampling_first_tokens_is_the_cost_of_samples_not_of_prefill() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=0, num_prefill_tokens=100, step_s=0.15, num_sampled=100, sample_s=0.1)
    assert meter.pace.sample_row_s == pytest.approx(0.001)
    assert meter.pace.prefill_token_s == pytest.approx(0.0005)
    assert meter.pace.tokens_of_samples(128) in (256, 257)
    meter.observe(num_decoding=4, num_prefill_tokens=0, step_s=0.01, num_sampled=4, sample_s=0.004)
    assert meter.pace.decode_step_s == pytest.approx(0.01)


def test_rows_sampled_on_a_device_cost_no_prefill_tokens() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=4, num_prefill_tokens=0, step_s=0.01)
    assert meter.pace.tokens_of_samples(128) == 0


def test_an_empty_step_changes_nothing() -> None:
    meter = PaceMeter()
    meter.observe(num_decoding=0, num_prefill_tokens=0, step_s=3.0)
    assert meter.pace == Pace()


@pytest.mark.parametrize(
    ("decode_step_s", "tokens"),
    [(0.005, 45), (0.030, 20), (0.040, 20), (0.050, 25), (0.150, 75)],
)
def test_prefill_gets_the_rest_of_the_budget_but_at_least_half_of_decodings_time(
    decode_step_s: float, tokens: int
) -> None:
    pace = Pace(decode_step_s=decode_step_s, prefill_token_s=0.001)
    assert pace.tokens_within(0.050 + 1e-9) == tokens


def test_the_prefill_rate_accounts_for_decoding_in_the_same_steps() -> None:
    pace = Pace(decode_step_s=0.020, prefill_token_s=0.001)
    assert pace.prefill_tokens_per_s() == pytest.approx(1000)
    assert pace.prefill_tokens_per_s(0.050) == pytest.approx(600)
    assert pace.prefill_tokens_per_s(0.010) == pytest.approx(1000 / 3)


def test_as_long_as_steps_have_equal_rows_a_row_costs_its_share() -> None:
    meter = PaceMeter()
    for _ in range(50):
        meter.observe(num_decoding=4, num_prefill_tokens=0, step_s=0.008)
    assert meter.pace.decode_row_s == pytest.approx(0.002)
    assert meter.pace.base_step_s == pytest.approx(0.0, abs=1e-9)


def test_steps_with_other_rows_show_what_a_row_adds() -> None:
    meter = PaceMeter()
    for step in range(300):
        rows = 1 + step % 16
        meter.observe(num_decoding=rows, num_prefill_tokens=0, step_s=0.006 + 0.0005 * rows)
    assert meter.pace.decode_row_s == pytest.approx(0.0005, rel=0.1)
    assert meter.pace.base_step_s + 20 * meter.pace.decode_row_s == pytest.approx(0.016, rel=0.05)


def test_a_row_is_never_free_of_charge_below_zero_nor_more_than_the_step() -> None:
    meter = PaceMeter()
    for rows, step_s in ((1, 0.02), (8, 0.01), (1, 0.02), (8, 0.01)):
        meter.observe(num_decoding=rows, num_prefill_tokens=0, step_s=step_s)
        assert 0 <= meter.pace.decode_row_s <= 0.02
