"""Where a prompt is prefilled, as a table of numbers and as properties."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.ids import WorkerId
from pdserve.peers.workers import WorkerLoad, WorkerRecord
from router_svc.routing.in_flight import InFlight, QueuedPrompt
from router_svc.routing.local_prefill import (
    CLEARLY_SOONER,
    WORTHWHILE_S,
    ComputeBacklog,
    LocalPrefillReason,
    PrefillPlan,
    is_clearly_sooner,
    plan_by_load,
    prefill_rates,
)
from router_svc.routing.placement import Demand, Placement, choose_decode, choose_prefill
from tests.support.records import ME, worker_record

THRESHOLD = 64
LOAD, SHORT = LocalPrefillReason.LOAD, LocalPrefillReason.SHORT
DECODE, PREFILL = WorkerId("decode-0"), WorkerId("prefill-0")
MEASURED = WorkerLoad(
    free_blocks=1000, prefill_tokens_per_s=800.0, prefill_tokens_per_s_while_decoding=400.0, queued_tokens=0
)
counts = st.integers(0, 20_000)
rates = st.floats(1.0, 1e6)


def workers(decode: WorkerLoad = MEASURED, prefill: WorkerLoad = MEASURED) -> tuple[WorkerRecord, WorkerRecord]:
    decoding = replace(worker_record(DECODE), load=decode, max_num_seqs=64)
    return decoding, replace(worker_record(PREFILL, tier="prefill"), load=replace(prefill, running=0))


def placed(
    tokens: int, pair: tuple[WorkerRecord, WorkerRecord], in_flight: InFlight, **overlap: int
) -> tuple[Placement, Placement]:
    held = {WorkerId(name.replace("_", "-")): blocks for name, blocks in overlap.items()}
    demand = Demand(prompt_tokens=tokens, sequences=1, overlap=held)
    decode = choose_decode(pair[:1], demand, in_flight)
    prefill = choose_prefill(pair[1:], demand, in_flight)
    assert decode is not None
    assert prefill is not None
    return decode, prefill


def plan(
    tokens: int = 256, *, decode: WorkerLoad = MEASURED, prefill: WorkerLoad = MEASURED, **overlap: int
) -> PrefillPlan:
    in_flight = InFlight(ME)
    return plan_by_load(THRESHOLD, *placed(tokens, workers(decode, prefill), in_flight, **overlap), in_flight)


@pytest.mark.parametrize(
    ("decode", "prefill", "reason"),
    [
        # (queued tokens, sequences) on the decode worker, queued tokens on the prefill worker
        ((0, 0), 0, SHORT),
        ((0, 0), 50, SHORT),
        ((0, 0), 256, LOAD),
        ((256, 0), 256, SHORT),
        ((256, 0), 512, LOAD),
        # With running sequences it prefills half as fast.
        ((0, 1), 256, SHORT),
        ((0, 1), 512, LOAD),
        ((256, 8), 512, SHORT),
        ((256, 8), 1024, LOAD),
    ],
)
def test_a_decode_worker_prefills_if_it_is_clearly_sooner(
    decode: tuple[int, int], prefill: int, reason: LocalPrefillReason
) -> None:
    queued, sequences = decode
    made = plan(
        decode=replace(MEASURED, queued_tokens=queued, running=sequences),
        prefill=replace(MEASURED, queued_tokens=prefill),
    )
    assert made.reason is reason
    assert made.threshold == (256 if reason is LOAD else THRESHOLD)


def test_an_idle_prefill_tier_gets_the_prompt_however_slow_it_was_measured() -> None:
    slow = replace(MEASURED, prefill_tokens_per_s=100.0)
    assert plan(prefill=slow).reason is SHORT
    assert plan(prefill=replace(slow, queued_tokens=1)).reason is LOAD


def test_the_plan_explains_what_was_compared() -> None:
    made = plan(prefill=replace(MEASURED, queued_tokens=400))
    assert made.why == (
        "first token in about 320 ms (0 + 256 tokens) there, 820 ms (400 + 256 tokens) through prefill-0: "
        "prefills by itself"
    )
    assert plan().why.endswith("320 ms (0 + 256 tokens) through prefill-0")


def test_cached_blocks_count_on_both_workers() -> None:
    assert plan(1024, decode_0=40).reason is LOAD
    assert plan(1024, decode_0=40, prefill_0=40).reason is SHORT


def test_the_threshold_is_the_expected_number_of_uncached_tokens() -> None:
    assert plan(1024, decode_0=40).threshold == 1024 - 40 * 16


def test_a_short_remainder_needs_no_prediction() -> None:
    assert plan(THRESHOLD, prefill=replace(MEASURED, queued_tokens=9999)) == PrefillPlan(
        threshold=THRESHOLD, reason=SHORT
    )


def test_without_any_measured_rate_length_decides() -> None:
    idle = WorkerLoad(free_blocks=1000)
    assert plan(decode=idle, prefill=replace(idle, queued_tokens=9999)) == PrefillPlan(
        threshold=THRESHOLD, reason=SHORT
    )


def test_a_worker_without_a_measurement_is_assumed_as_fast_as_the_other() -> None:
    unknown, known = WorkerLoad(), WorkerLoad(prefill_tokens_per_s=800.0)
    assert prefill_rates(unknown, known, is_decoding=False) == (800.0, 800.0)
    assert prefill_rates(known, unknown, is_decoding=False) == (800.0, 800.0)
    assert prefill_rates(unknown, known, is_decoding=True) == (400.0, 800.0)
    assert prefill_rates(unknown, unknown, is_decoding=True) is None


def test_a_decode_worker_without_time_for_prefill_gets_no_prompt() -> None:
    stuck = replace(MEASURED, prefill_tokens_per_s_while_decoding=0.0, running=1)
    assert plan(decode=stuck, prefill=replace(MEASURED, queued_tokens=99_999)).reason is SHORT


def test_a_gain_too_small_to_notice_keeps_the_prompt_remote() -> None:
    fast = replace(MEASURED, prefill_tokens_per_s=100_000.0)
    assert plan(decode=fast, prefill=replace(fast, queued_tokens=1000)).reason is SHORT


@given(counts, counts, counts, rates, rates)
def test_a_longer_queue_never_makes_a_worker_the_better_choice(
    here: int, there: int, more: int, here_rate: float, there_rate: float
) -> None:
    decode = ComputeBacklog(queued_tokens=here, uncached_tokens=100, tokens_per_s=here_rate)
    prefill = ComputeBacklog(queued_tokens=there, uncached_tokens=100, tokens_per_s=there_rate)
    if is_clearly_sooner(decode, prefill):
        assert is_clearly_sooner(decode, replace(prefill, queued_tokens=there + more))
        assert decode.seconds <= CLEARLY_SOONER * prefill.seconds
        assert prefill.seconds - decode.seconds >= WORTHWHILE_S
        # Seen from the other side the choice is the same: it does not flap.
        assert not is_clearly_sooner(prefill, decode)
    else:
        assert not is_clearly_sooner(replace(decode, queued_tokens=here + more), prefill)


@given(
    st.lists(st.integers(THRESHOLD + 1, 2000), min_size=1, max_size=60),
    st.floats(100.0, 5000.0),
    st.floats(100.0, 5000.0),
    st.floats(0.2, 1.0),
)
def test_a_burst_leaves_neither_tier_far_behind(
    prompts: list[int], decode_rate: float, prefill_rate: float, share: float
) -> None:
    rate_while_decoding = decode_rate * share
    decoding = replace(MEASURED, running=1, prefill_tokens_per_s_while_decoding=rate_while_decoding)
    pair = workers(decoding, replace(MEASURED, prefill_tokens_per_s=prefill_rate))
    in_flight = InFlight(ME)
    with ExitStack() as burst:
        for tokens in prompts:
            # No worker reports anything in between.
            made = plan_by_load(THRESHOLD, *placed(tokens, pair, in_flight), in_flight)
            burst.enter_context(QueuedPrompt(in_flight).assigned(pair[made.reason is not LOAD], tokens))
        here, there = (
            in_flight.prompt_tokens(DECODE) / rate_while_decoding,
            in_flight.prompt_tokens(PREFILL) / prefill_rate,
        )
        one_here, one_there = max(prompts) / rate_while_decoding, max(prompts) / prefill_rate
        assert here <= CLEARLY_SOONER * (there + one_there)
        assert there <= max((here + one_here) / CLEARLY_SOONER, here + one_here + WORTHWHILE_S, one_there)
    assert in_flight.prompt_tokens(DECODE) == in_flight.prompt_tokens(PREFILL) == 0


def test_a_burst_is_shared_in_proportion_to_the_rates() -> None:
    pair, in_flight = workers(), InFlight(ME)
    with ExitStack() as burst:
        for _ in range(16):
            made = plan_by_load(THRESHOLD, *placed(256, pair, in_flight), in_flight)
            burst.enter_context(QueuedPrompt(in_flight).assigned(pair[made.reason is not LOAD], 256))
            burst.enter_context(in_flight.decoding(DECODE, 1))
        assert in_flight.prompt_tokens(DECODE) == 4 * 256
        assert in_flight.prompt_tokens(PREFILL) == 12 * 256
