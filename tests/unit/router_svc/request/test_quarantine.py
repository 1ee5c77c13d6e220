"""Requests that are refused for a time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pdserve.base.errors import Quarantined
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from router_svc.generation import Generation, TextRules
from router_svc.request.quarantine import DIGEST_BYTES, MAX_REFUSED, Deaths, Quarantine
from tests.support.callbacks import LIMIT_S

POISON = Generation(
    request_id=RequestId("cmpl-1"),
    worker_request_id=RequestId("cmpl-1"),
    prompt=(1, 2, 3),
    sampling=SamplingParams(seed=1, temperature=0.5),
    text=TextRules(),
    endpoint="test",
)


def test_the_same_request_is_refused_for_ten_minutes_whatever_its_id_and_seed() -> None:
    quarantine = Quarantine()
    quarantine.add(POISON, now=100.0)
    again = replace(POISON, request_id=RequestId("cmpl-2"), sampling=replace(POISON.sampling, seed=2))
    with pytest.raises(Quarantined, match="refused for another 590 s"):
        quarantine.check(again, now=110.0)
    quarantine.check(replace(POISON, prompt=(1, 2, 4)), now=110.0)
    quarantine.check(replace(POISON, sampling=replace(POISON.sampling, top_k=3)), now=110.0)
    quarantine.check(again, now=700.0)
    assert len(quarantine) == 0


def test_refusals_of_other_routers_end_when_theirs_do() -> None:
    mine, theirs = Quarantine(b"key"), Quarantine(b"key")
    shared: list[bytes] = []
    theirs.on_add = shared.append
    theirs.add(POISON, now=0.0)
    [digest] = shared
    mine.add(replace(POISON, prompt=(5,)), now=100.0)
    mine.merge([(digest, 60.0)], now=100.0)
    with pytest.raises(Quarantined, match="refused for another 50 s"):
        mine.check(POISON, now=110.0)
    mine.merge([(digest, 49.0)], now=111.0)
    mine.check(POISON, now=160.0)
    assert len(mine) == 1
    mine.merge([(digest, -1.0)], now=161.0)
    mine.merge([(digest, 1e18)], now=161.0)
    mine.check(POISON, now=761.0)


def test_refusals_of_other_routers_evict_none_of_its_own() -> None:
    """A process that writes to Redis could fill it with refusals that last longer, or let one end early."""
    digests: list[bytes] = []
    quarantine = Quarantine()
    quarantine.on_add = digests.append
    for token in range(MAX_REFUSED):
        quarantine.add(replace(POISON, prompt=(token,)), now=100.0)
    strangers = [(index.to_bytes(DIGEST_BYTES, "big"), 600.0) for index in range(1, 2 * MAX_REFUSED)]
    quarantine.merge([*strangers, (digests[0], 0.5)], now=110.0)
    assert len(quarantine) == 2 * MAX_REFUSED
    for token in range(MAX_REFUSED):
        with pytest.raises(Quarantined):
            quarantine.check(replace(POISON, prompt=(token,)), now=120.0)


def test_a_full_list_of_other_routers_refusals_holds_no_event_loop() -> None:
    """Each one was sorted in by itself, in 100 ms for all."""
    quarantine = Quarantine()
    for shift in (0, 1):
        page = [((index + shift).to_bytes(DIGEST_BYTES, "big"), 590.0 - index / 2) for index in range(MAX_REFUSED)]
        start = time.thread_time()
        quarantine.merge(page, now=100.0 * (1 + shift))
        assert time.thread_time() - start < LIMIT_S
    assert len(quarantine) == MAX_REFUSED


def test_digests_differ_by_key_so_that_no_stranger_can_make_or_guess_them() -> None:
    digests: list[bytes] = []
    for key in (b"", b"one", b"another"):
        quarantine = Quarantine(key)
        quarantine.on_add = digests.append
        quarantine.add(POISON, now=0.0)
    assert len(set(digests)) == 3


def test_the_number_of_refused_requests_is_bounded() -> None:
    quarantine = Quarantine()
    for token in range(2000):
        quarantine.add(replace(POISON, prompt=(token,)), now=100.0)
    assert len(quarantine) == 1024
    quarantine.check(replace(POISON, prompt=(0,)), now=101.0)
    with pytest.raises(Quarantined):
        quarantine.check(replace(POISON, prompt=(1999,)), now=101.0)


def test_decisions_say_what_lost_workers_mean_for_later_ones() -> None:
    once = Deaths().after("prefill")
    assert once.remark == "stays in the prefill tier"
    assert once.after("prefill").remark == "stays in the prefill tier, in steps of its own"
