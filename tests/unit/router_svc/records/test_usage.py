"""Usage as sums: what a prompt costs, the day it counts on, batches, and the labels of tenants."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pdserve.base.errors import PdserveError
from pdserve.base.ids import Epoch, RequestId, WorkerId
from router_svc.records.events import (
    DecodeStarted,
    Ended,
    Event,
    FirstToken,
    Prefilled,
    PrefillProgressed,
    WorkerChosen,
)
from router_svc.records.metrics import RouterMetrics
from router_svc.records.record import Record
from router_svc.records.request_state import RequestProgress
from router_svc.records.usage import (
    MAX_LABELS,
    Account,
    PendingUsage,
    TenantTotals,
    Usage,
    day_of,
    days_beyond,
    tokens_charged,
    usage_of,
)


def account(tenant: str = "team", key_id: str = "k") -> Account:
    return Account(tenant=tenant, key_id=key_id, model="org/m:1")


def record(*events: Event, completion_tokens: int = 0) -> Record:
    request_id = RequestId("r")
    made = Record(
        request_id=request_id,
        endpoint="e",
        prompt_tokens=10,
        max_tokens=5,
        n=1,
        accepted_at=0.0,
        clock=lambda: 0.0,
        accepted_clock=0.0,
        progress=RequestProgress.new(request_id, at=0.0),
        completion_tokens=completion_tokens,
    )
    for event in events:
        made.append(event, at=0.0)
    return made


CHOSEN = WorkerChosen(worker=WorkerId("d"), epoch=Epoch(1), tier="decode", why="idle")
LEFT, FAILED = Ended.ended_early(None), Ended.failed(PdserveError("it failed"))


def prefilled(cached_tokens: int) -> Prefilled:
    return Prefilled(cached_tokens=cached_tokens, is_complete=False)


def local_prefill(cached_tokens: int) -> DecodeStarted:
    return DecodeStarted(
        worker=WorkerId("d"), queue_s=0.0, is_prefilled_locally=True, cached_tokens=cached_tokens, computing_s=0.0
    )


def unix(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_a_prompt_costs_nothing_before_its_prefill_and_all_of_it_from_then_on() -> None:
    """Fails if usage begins with the first token: a client that leaves before would compute for nothing."""
    assert usage_of(record(CHOSEN)) == Usage()
    progress = PrefillProgressed(computing_s=0.0, cached_tokens=4, computed_tokens=0)
    assert usage_of(record(CHOSEN, progress)) == Usage(input_tokens=10, cached_tokens=4)
    assert usage_of(record(CHOSEN, local_prefill(0))) == Usage(input_tokens=10)


def test_a_client_that_leaves_pays_for_its_prompt_once_a_worker_may_compute_it() -> None:
    queued, failed, left = record(LEFT), record(CHOSEN, FAILED), record(CHOSEN, LEFT)
    assert [tokens_charged(ended) for ended in (queued, failed, left)] == [0, 0, 10]
    assert usage_of(left) == Usage()
    assert tokens_charged(record(CHOSEN, prefilled(0), LEFT, completion_tokens=3)) == 13


def test_cached_tokens_are_among_those_of_the_prompt() -> None:
    """After a failure the decode worker may have more cached than the prompt: what was generated before."""
    ended = record(CHOSEN, local_prefill(16), completion_tokens=7)
    assert usage_of(ended) == Usage(input_tokens=10, cached_tokens=10, output_tokens=7)


def test_a_client_pays_for_the_prompt_as_it_was_computed_first() -> None:
    """Fails if a retry, which finds the prompt cached, makes it cheaper."""
    again = record(CHOSEN, prefilled(4), FirstToken(), CHOSEN, local_prefill(9), completion_tokens=1)
    assert usage_of(again) == Usage(input_tokens=10, cached_tokens=4, output_tokens=1)


def test_a_request_counts_on_the_day_of_its_end_in_utc() -> None:
    pending = PendingUsage(max_rows=10)
    pending.add(account(), Usage(requests=1), unix("2026-11-23T23:59:59.999"))
    pending.add(account(), Usage(requests=2), unix("2026-11-24T00:00:00"))
    pending.add(account(), Usage(requests=4), unix("2026-11-24T23:00:00"))
    batches = [pending.take(10), pending.take(10), pending.take(10)]
    assert [batch and (batch.day, batch.rows[account()].requests) for batch in batches] == [
        ("2026-11-23", 1),
        ("2026-11-24", 6),
        None,
    ]
    assert day_of(unix("2024-02-29T00:00:00")) == "2024-02-29"


def test_batches_are_bounded_and_numbered_and_have_each_row_once() -> None:
    pending = PendingUsage(max_rows=100)
    for number in range(5):
        pending.add(account(key_id=str(number)), Usage(requests=1), 0.0)
    batches = [pending.take(2) for _ in range(3)]
    assert [batch and (batch.sequence, len(batch.rows)) for batch in batches] == [(1, 2), (2, 2), (3, 1)]
    assert len({each for batch in batches if batch for each in batch.rows}) == 5
    assert pending.take(2) is None


def test_beyond_the_bound_new_rows_are_dropped_and_known_ones_still_grow() -> None:
    pending = PendingUsage(max_rows=1)
    pending.add(account(), Usage(requests=1), 0.0)
    pending.add(account(key_id="other"), Usage(requests=1), 0.0)
    pending.add(account(), Usage(requests=1), 0.0)
    assert pending.dropped == 1
    batch = pending.take(10)
    assert batch is not None
    assert batch.rows == {account(): Usage(requests=2)}
    pending.add(account(key_id="other"), Usage(requests=1), 0.0)
    assert pending.dropped == 1


def test_the_oldest_days_go_first_and_the_latest_stays_however_large_it_is() -> None:
    days = [("23", 3), ("22", 2), ("21", 0), ("20", 1), ("19", 4)]
    assert days_beyond(days, 10) == []
    assert days_beyond(days, 9) == ["19"]
    assert days_beyond(days, 5) == ["20", "19"]
    assert days_beyond(days, 1) == ["22", "20", "19"]


def test_the_labels_of_tenants_are_bounded_and_the_others_share_one() -> None:
    totals = TenantTotals()
    totals.known = lambda: [f"t{number}" for number in range(MAX_LABELS + 50)]
    assert len(totals.by_label()) == MAX_LABELS
    for number in range(MAX_LABELS + 50):
        totals.add(f"t{number}", Usage(requests=1, input_tokens=3))
    labels = totals.by_label()
    assert len(labels) == MAX_LABELS + 1
    assert labels["t0"] == Usage(requests=1, input_tokens=3)
    assert labels["other"] == Usage(requests=50, input_tokens=150)
    # A changed file of keys cannot take a label from one that has it.
    totals.known = lambda: ["new"]
    assert totals.by_label().keys() == labels.keys()


@pytest.mark.parametrize("known", [(), ("a", "b")])
def test_tenants_have_series_from_the_start_and_without_keys_there_are_none(known: tuple[str, ...]) -> None:
    metrics = RouterMetrics(model_name="m")
    metrics.tenants.known = lambda: known
    found = {
        (sample.name, sample.labels["tenant"], sample.labels.get("kind"), sample.value)
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith("pdserve_tenant_")
    }
    kinds = [
        (f"pdserve_tenant_{what}_total", kind)
        for what, kind in [("requests", None), ("tokens", "input"), ("tokens", "cached"), ("tokens", "output")]
    ]
    assert found == {(name, tenant, kind, 0.0) for name, kind in kinds for tenant in known}
