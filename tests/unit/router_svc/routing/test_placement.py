"""Which worker gets a request."""

from __future__ import annotations

from dataclasses import replace

from decode_svc.migration.eviction import EvictionPolicy
from pdserve.base.ids import WorkerId
from pdserve.engine.step import Load
from pdserve.peers.workers import Tier, WorkerLoad, WorkerRecord
from router_svc.routing.in_flight import InFlight
from router_svc.routing.placement import (
    SEQUENCE_TOKENS,
    Demand,
    Placement,
    choose_decode,
    choose_prefill,
    has_spare_blocks,
)
from tests.support.groups import TWO_GROUPS
from tests.support.records import ME, worker_record

LOAD = Load(
    num_running=0,
    num_waiting=0,
    num_held=0,
    queued_prompt_tokens=0,
    queued_by_router={},
    free_blocks=0,
    total_blocks=0,
    reserved_blocks=0,
    waiting_blocks=0,
    num_preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
)


def worker(name: str, tier: Tier = "decode", **load: int) -> WorkerRecord:
    return replace(worker_record(name, tier=tier), load=WorkerLoad(**({"free_blocks": 100} | load)))


def demand(tokens: int = 160, *, sequences: int = 1, **overlap: int) -> Demand:
    return Demand(
        prompt_tokens=tokens,
        sequences=sequences,
        overlap={WorkerId(name.replace("_", "-")): blocks for name, blocks in overlap.items()},
    )


def name_of(placement: Placement | None) -> str:
    assert placement is not None
    return placement.worker.worker_id


def test_a_cached_prefix_attracts_a_request() -> None:
    workers = [worker("decode-0"), worker("decode-1")]
    chosen = choose_decode(workers, demand(decode_1=5), InFlight(ME))
    assert name_of(chosen) == "decode-1"
    assert chosen is not None
    assert chosen.expected_cached_tokens == 80
    assert chosen.why == "80 of 160 tokens cached, cost 80; next best decode-0 costs 160"


def test_load_outweighs_a_short_cached_prefix() -> None:
    busy = worker("decode-1", running=80 // SEQUENCE_TOKENS + 1)
    assert name_of(choose_decode([worker("decode-0"), busy], demand(decode_1=5), InFlight(ME))) == "decode-0"


def test_the_choice_among_equal_workers_is_deterministic() -> None:
    workers = [worker("decode-1"), worker("decode-0")]
    assert {name_of(choose_decode(workers, demand(), InFlight(ME))) for _ in range(5)} == {"decode-0"}


def test_requests_placed_since_the_last_heartbeat_count() -> None:
    workers = [worker("decode-0"), worker("decode-1")]
    in_flight = InFlight(ME)
    with in_flight.decoding(WorkerId("decode-0"), 1):
        assert name_of(choose_decode(workers, demand(), in_flight)) == "decode-1"
    assert name_of(choose_decode(workers, demand(), in_flight)) == "decode-0"


def test_a_full_worker_is_chosen_only_when_all_are() -> None:
    no_slots = worker("decode-0", running=8)
    no_blocks = worker("decode-1", free_blocks=3)
    free = worker("decode-2", running=7)
    assert name_of(choose_decode([no_slots, no_blocks, free], demand(decode_0=10), InFlight(ME))) == "decode-2"
    chosen = choose_decode([no_slots, no_blocks], demand(), InFlight(ME))
    assert chosen is not None
    assert "(full)" in chosen.why


def test_cached_blocks_need_not_be_free() -> None:
    assert choose_decode([worker("decode-0", free_blocks=1)], demand(decode_0=10), InFlight(ME)) is not None
    placement = choose_decode([worker("decode-0", free_blocks=1)], demand(decode_0=10), InFlight(ME))
    assert placement is not None
    assert "(full)" not in placement.why


def test_a_prompt_needs_blocks_of_each_kv_group() -> None:
    grouped = [replace(worker("decode-0", free_blocks=blocks), layout=TWO_GROUPS) for blocks in (82, 81)]
    chosen = [choose_decode([each], demand(160), InFlight(ME)) for each in grouped]
    assert ["(full)" in placement.why for placement in chosen if placement] == [False, True]


def test_a_worker_that_a_full_one_is_left_for_does_not_want_to_be_left_itself() -> None:
    """The policy by which workers ask for it is the product's own: no request goes back and forth."""
    for running in range(1, 40):
        accepted = [
            free
            for free in range(1, 100)
            if has_spare_blocks(worker("decode-0", running=running, free_blocks=free), demand(), InFlight(ME))
        ]
        blocks = 160 // worker("decode-0").layout.block_size + 1
        held = replace(LOAD, num_running=running + 1, free_blocks=min(accepted, default=1000) - blocks)
        assert not EvictionPolicy().is_due(held, 0.0), running


def test_requests_on_their_way_take_blocks_that_their_worker_does_not_report_yet() -> None:
    target, in_flight = worker("decode-0", free_blocks=40), InFlight(ME)
    assert has_spare_blocks(target, demand(), in_flight)
    with in_flight.decoding(target.worker_id, 2):
        assert not has_spare_blocks(target, demand(), in_flight)
        reported = replace(target, load=replace(target.load, running=2))
        assert has_spare_blocks(reported, demand(), in_flight)


def test_room_for_a_move_is_counted_in_blocks_of_all_kv_groups() -> None:
    grouped = replace(worker("decode-0", free_blocks=40), layout=TWO_GROUPS)
    assert has_spare_blocks(worker("decode-0", free_blocks=40), demand(), InFlight(ME))
    assert not has_spare_blocks(grouped, demand(), InFlight(ME))


def test_prefill_goes_to_the_worker_that_finishes_the_prompt_first() -> None:
    workers = [worker("prefill-0", "prefill", queued_tokens=100), worker("prefill-1", "prefill", queued_tokens=20)]
    assert name_of(choose_prefill(workers, demand(), InFlight(ME))) == "prefill-1"
    assert name_of(choose_prefill(workers, demand(prefill_0=6), InFlight(ME))) == "prefill-0"


def test_prompts_placed_since_the_last_heartbeat_count_as_queued() -> None:
    workers = [worker("prefill-0", "prefill"), worker("prefill-1", "prefill")]
    in_flight = InFlight(ME)
    with in_flight.prefilling(WorkerId("prefill-0"), 160):
        assert name_of(choose_prefill(workers, demand(), in_flight)) == "prefill-1"


def test_failed_and_unready_workers_are_no_candidates() -> None:
    failed = worker("decode-0")
    loading = replace(worker("decode-1"), ready=False)
    wanted = replace(demand(), excluded={(failed.worker_id, failed.epoch)})
    assert choose_decode([failed, loading], wanted, InFlight(ME)) is None
    restarted = worker_record("decode-0", epoch=2)
    assert name_of(choose_decode([restarted, loading], wanted, InFlight(ME))) == "decode-0"


def test_the_last_token_is_computed_even_if_it_is_cached() -> None:
    chosen = choose_prefill([worker("prefill-0", "prefill")], demand(160, prefill_0=10), InFlight(ME))
    assert chosen is not None
    assert (chosen.expected_cached_tokens, chosen.cost_tokens) == (159, 1)
