"""The record a worker publishes, and the rules by which a router trusts it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdserve.base.errors import StoreError
from pdserve.base.ids import Epoch, RouterId, WorkerId
from pdserve.peers.record_fields import record_from_fields, record_to_fields, require_small, worker_id_from
from pdserve.peers.workers import (
    Sighting,
    TransportReport,
    WorkerLoad,
    WorkerRecord,
    WorkerView,
)
from tests.support.records import worker_record

A = WorkerId("a")


def sighting(worker_id: str = "a", *, epoch: int = 1, beat: int = 1) -> Sighting:
    return Sighting(record=worker_record(worker_id, epoch=epoch), beat=beat)


def shown(view: WorkerView) -> list[str]:
    return [record.worker_id for record in view.workers_of("decode")]


#: Members of "load" that the oldest routers know; these cannot read a record with others.
OLD_LOAD = {
    "running",
    "waiting",
    "queued_tokens",
    "free_blocks",
    "prefill_tokens_per_s",
    "prefill_tokens_per_s_beside_decoding",
}


def fields_of(record: WorkerRecord) -> dict[str, bytes]:
    """The record's fields as Redis returns them."""
    return {name: value.encode() for name, value in record_to_fields(record).items()}


@pytest.mark.parametrize("by_router", [None, {}, {RouterId("me"): 600}])
def test_a_record_survives_redis(by_router: dict[RouterId, int] | None) -> None:
    record = worker_record(epoch=2**62, ready=False)
    record = replace(
        record,
        home_tier="prefill",
        load=WorkerLoad(
            free_blocks=7, queued_tokens=700, prefill_tokens_per_s_while_decoding=9.0, queued_by_router=by_router
        ),
    )
    assert record_from_fields(record.worker_id, fields_of(record)) == record


def test_the_paths_of_a_worker_survive_redis() -> None:
    record = replace(worker_record(), transport=TransportReport(paths={"tcp": 2}, degraded="to decode-0: why"))
    assert record_from_fields(record.worker_id, fields_of(record)) == record


def test_the_record_of_an_older_worker_has_no_paths() -> None:
    fields = fields_of(worker_record())
    del fields["transport"]
    assert record_from_fields(WorkerId("decode-0"), fields).transport == TransportReport()


def test_a_worker_announces_its_keep_alives() -> None:
    record = replace(worker_record(), keep_alive_s=1.0)
    assert record_from_fields(record.worker_id, fields_of(record)) == record


def test_the_record_of_an_older_worker_announces_no_keep_alives() -> None:
    fields = fields_of(worker_record())
    del fields["keep_alive_s"]
    assert record_from_fields(WorkerId("decode-0"), fields).keep_alive_s is None


def test_an_older_router_can_read_the_record() -> None:
    load = WorkerLoad(queued_by_router={RouterId("me"): 600})
    assert set(json.loads(fields_of(replace(worker_record(), load=load))["load"])) == OLD_LOAD


def test_the_record_of_an_older_worker_does_not_count_prompts_by_router() -> None:
    record = replace(worker_record(), load=WorkerLoad(queued_tokens=700))
    fields = fields_of(record)
    del fields["queued_by_router"]
    assert record_from_fields(record.worker_id, fields) == record


def test_fields_that_a_newer_worker_adds_are_ignored() -> None:
    fields = fields_of(worker_record())
    fields |= {"hue": b"1", "load": json.dumps({**json.loads(fields["load"]), "hue": 1}).encode()}
    assert record_from_fields(WorkerId("decode-0"), fields) == worker_record()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", None),
        ("epoch", b"one"),
        ("tier", b"both"),
        ("layout", b"{"),
        ("layout", b'{"x": 1}'),
        ("load", b"[]"),
        ("queued_by_router", b"{"),
        ("epoch", b"9" * 5000),
        ("epoch", b"-1"),
        ("tier", b"\xff"),
        ("transport", b"[]"),
        ("transport", b"[" * 100_000),
        ("transport", b'{"degraded": 1}'),
        ("load", b'{"free_blocks": "7"}'),
        ("load", b'{"free_blocks": -1}'),
        ("load", b'{"prefill_tokens_per_s": NaN}'),
        ("queued_by_router", b'{"r": [1]}'),
        ("keep_alive_s", b"NaN"),
        ("keep_alive_s", b"-1"),
        ("layout", b'{"model": [], "dtype": {}, "block_size": 0}'),
        ("max_num_seqs", b"0"),
        ("max_model_len", b"1_0"),
        ("grpc_address", b"unix:/run/x"),
        ("stream_address", b"d:http"),
        ("stream_address", b"a..b:7001"),
        ("stream_address", b"%b:7001" % (64 * b"a")),
        ("http_address", b"d:70000"),
    ],
)
def test_an_unreadable_record_is_a_store_error_that_names_the_worker(field: str, value: bytes | None) -> None:
    fields = fields_of(worker_record())
    if value is None:
        del fields[field]
    else:
        fields[field] = value
    with pytest.raises(StoreError, match="decode-0"):
        record_from_fields(WorkerId("decode-0"), fields)


def test_a_rate_of_zero_is_no_measurement() -> None:
    """Nothing can be divided by it."""
    load = WorkerLoad(prefill_tokens_per_s=0.0, prefill_tokens_per_s_while_decoding=0.0)
    record = replace(worker_record(), load=load)
    assert record_from_fields(record.worker_id, fields_of(record)).load == WorkerLoad()


@pytest.mark.parametrize("name", [b"\xff\xfe", b"", b"a\nb", b"a" * 5000])
def test_what_is_no_printable_text_is_no_id_of_a_worker(name: bytes) -> None:
    with pytest.raises(StoreError, match="its id"):
        worker_id_from(name)


def test_a_record_that_would_take_long_to_read_is_not_read() -> None:
    with pytest.raises(StoreError, match="bytes"):
        require_small(WorkerId("decode-0"), {**fields_of(worker_record()), "more": b"x" * 70_000})


def test_workers_come_sorted_and_by_tier() -> None:
    view = WorkerView(grace_s=5)
    prefill = Sighting(record=worker_record("p", tier="prefill"), beat=1)
    view.apply([sighting("b"), prefill, sighting("a")], read_at=0)
    assert shown(view) == ["a", "b"]
    assert [record.worker_id for record in view.workers_of("prefill")] == ["p"]


def test_only_a_visible_change_is_reported() -> None:
    view = WorkerView(grace_s=5)
    assert view.apply([sighting(beat=1)], read_at=0)
    assert not view.apply([sighting(beat=2)], read_at=1)
    assert view.apply([sighting(beat=3, epoch=2)], read_at=2)
    assert view.apply([], read_at=3)


def test_known_workers_stay_during_an_outage_and_its_grace_period() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting("a"), sighting("b")], read_at=0)
    assert view.registry_lost(now=1)
    assert not view.registry_lost(now=2)
    assert shown(view) == ["a", "b"]
    view.apply([], read_at=100)
    assert shown(view) == ["a", "b"]
    view.apply([sighting("b")], read_at=104.9)
    assert shown(view) == ["a", "b"]
    view.apply([sighting("b")], read_at=105)
    assert shown(view) == ["b"]


def test_a_lost_worker_stays_excluded_while_only_its_old_record_exists() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting(beat=4)], read_at=0)
    assert view.mark_lost(A, Epoch(1), now=0.5)
    # A heartbeat that was written before the death and read after it proves nothing.
    view.apply([sighting(beat=5)], read_at=1)
    view.apply([sighting(beat=5)], read_at=2)
    assert shown(view) == []


def test_a_read_started_before_the_loss_proves_nothing() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting(beat=4)], read_at=0)
    view.mark_lost(A, Epoch(1), now=1.0)
    view.apply([sighting(beat=5)], read_at=0.9)
    view.apply([sighting(beat=6)], read_at=2.0)
    assert shown(view) == []


def test_a_heartbeat_after_the_loss_brings_the_worker_back() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting(beat=4)], read_at=0)
    view.mark_lost(A, Epoch(1), now=0.5)
    view.apply([sighting(beat=5)], read_at=1)
    assert view.apply([sighting(beat=6)], read_at=2)
    assert shown(view) == ["a"]


def test_suspicion_ends_by_itself_while_the_registry_is_unreadable_and_lasts_longer_each_time() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting()], read_at=0)
    view.registry_lost(now=0)
    now = 0.0
    for lasts_s in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        assert view.mark_lost(A, Epoch(1), now=now)
        assert not view.registry_lost(now=now + lasts_s - 0.1)
        assert shown(view) == []
        now += lasts_s
        assert view.registry_lost(now=now)
        assert shown(view) == ["a"]
        assert not view.registry_lost(now=now)
    # It answers, which ends its history, too.
    assert not view.mark_alive(A, Epoch(1))
    assert view.mark_lost(A, Epoch(1), now=now)
    assert view.registry_lost(now=now + 5)


def test_suspicion_does_not_end_by_itself_while_heartbeats_can_be_read() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting()], read_at=0)
    view.mark_lost(A, Epoch(1), now=0)
    for read_at in (1, 60, 3600):
        assert not view.apply([sighting()], read_at=read_at)
    assert shown(view) == []


def test_a_new_epoch_brings_the_worker_back_at_once() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting(epoch=1)], read_at=0)
    view.mark_lost(A, Epoch(1), now=0.5)
    assert view.apply([sighting(epoch=2)], read_at=1)
    assert shown(view) == ["a"]


def test_the_death_of_an_old_epoch_does_not_hide_the_new_one() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting(epoch=2)], read_at=0)
    assert not view.mark_lost(A, Epoch(1), now=1)
    assert shown(view) == ["a"]


def test_an_answer_reverts_the_loss() -> None:
    view = WorkerView(grace_s=5)
    view.apply([sighting()], read_at=0)
    view.mark_lost(A, Epoch(1), now=1)
    assert not view.mark_alive(A, Epoch(2))
    assert view.mark_alive(A, Epoch(1))
    assert shown(view) == ["a"]
    assert not view.mark_alive(A, Epoch(1))
