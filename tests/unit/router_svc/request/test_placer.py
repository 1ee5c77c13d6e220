"""Which worker is next: not one that has failed the prompt, nor one that would cut the answer off."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.base.errors import Draining, NoFreeBlocks, PdserveError, PeerLost
from pdserve.base.ids import RequestId, RouterId
from pdserve.base.sampling import SamplingParams
from pdserve.peers.workers import WorkerRecord
from router_svc.generation import Generation, TextRules
from router_svc.request.placer import Placer
from router_svc.request.recovery import MAX_PREFILL_FAILURES
from router_svc.routing.cluster import PrefixHashes
from router_svc.routing.in_flight import InFlight
from router_svc.routing.incarnation import incarnation_of
from tests.support.records import worker_record

GENERATION = Generation(
    request_id=RequestId("r"),
    worker_request_id=RequestId("r"),
    prompt=(1,),
    sampling=SamplingParams(max_tokens=60),
    text=TextRules(),
    endpoint="test",
)


def placer(ready: list[WorkerRecord], *, open_lengths: dict[int, int] | None = None, fills: bool = False) -> Placer:
    cluster: Any = SimpleNamespace(
        ready=lambda tier, layout=None: [each for each in ready if each.tier == tier and layout in (None, each.layout)],
        in_flight=InFlight(RouterId("me")),
    )
    output: Any = SimpleNamespace(open_lengths=open_lengths or {})
    return Placer(GENERATION, PrefixHashes(GENERATION.prompt, b""), cluster, output, fills_context=fills)


def prefill(*names: str) -> list[WorkerRecord]:
    return [worker_record(name, tier="prefill") for name in names]


def test_a_prompt_is_not_handed_over_from_a_worker_to_itself() -> None:
    """The decode worker may take the role of a prefill worker after it was chosen."""
    ready = prefill("one", "two")
    chosen = placer(ready)
    for decode, other in (("one", "two"), ("two", "one")):
        placement = chosen.choose_prefill(worker_record(decode))
        assert placement is not None
        assert placement.worker.worker_id == other
    del ready[1]
    assert chosen.choose_prefill(worker_record("one")) is None


def test_a_ticket_without_an_address_goes_to_a_worker_that_asks_and_any_other_to_all() -> None:
    """Whatever was asked of the same request before: an earlier attempt may have seen other workers."""
    asking, older = (replace(each, asks_for_addresses=each.worker_id == "asks") for each in prefill("asks", "older"))
    ready, decode = [asking], worker_record("d")
    chosen = placer(ready)
    assert chosen.senders_ask
    ready[:] = [older]
    assert not chosen.senders_ask
    assert chosen.choose_prefill(decode, must_ask=True) is None
    assert chosen.choose_prefill(decode) is not None
    ready[:] = [older, asking]
    assert not chosen.senders_ask
    placement = chosen.choose_prefill(decode, must_ask=True)
    assert placement is not None
    assert placement.worker == asking
    failed = PeerLost("It has left.")
    assert not chosen.has_other_prefill(placement, failed, decode, must_ask=True)
    assert chosen.has_other_prefill(placement, failed, decode)
    ready.clear()
    assert not chosen.senders_ask, "a worker that comes back may be an older one"


@pytest.mark.parametrize(
    ("lengths", "fills", "able"),
    [
        ((64, 32), False, ["64"]),
        ((32, 16), False, []),
        ((64, 32), True, ["64"]),
        ((32, 16, 3), True, ["32", "16"]),
    ],
    ids=["one holds it", "none does", "all of the context", "all of a longer context"],
)
def test_candidates_hold_the_prompt_and_all_that_may_follow(
    lengths: tuple[int, ...], fills: bool, able: list[str]
) -> None:
    """A request for the rest of the context goes on where that is shorter, as far as its output is not longer yet."""
    workers = [replace(worker_record(str(length)), max_model_len=length) for length in lengths]
    chosen = placer(workers, open_lengths={0: 2}, fills=fills)
    found = []
    while (placement := chosen.choose("decode", {*map(incarnation_of, found)}, None)) is not None:
        found.append(placement.worker)
    assert sorted(worker.worker_id for worker in found) == sorted(able)


@pytest.mark.parametrize(
    ("error", "counts"), [(NoFreeBlocks("full"), True), (Draining("it drains"), False)], ids=["lives", "drains"]
)
def test_a_prefill_worker_that_has_failed_gets_no_further_attempt_and_two_that_live_end_them(
    error: PdserveError, counts: bool
) -> None:
    names = [str(number) for number in range(MAX_PREFILL_FAILURES + 1)]
    chosen, failed = placer(prefill(*names)), []
    for _ in range(MAX_PREFILL_FAILURES):
        placement = chosen.choose_prefill(None)
        assert placement is not None
        chosen.exclude_prefill(placement, error)
        failed.append(placement.worker.worker_id)
    assert len({*failed}) == MAX_PREFILL_FAILURES
    last = chosen.choose_prefill(None)
    assert (None if last is None else {*failed, last.worker.worker_id}) == (None if counts else {*names})


def test_a_worker_of_the_decode_workers_numerics_class_comes_first() -> None:
    decode = worker_record("d")
    ready = [replace(worker_record("p0", tier="prefill"), numerics_class="another"), *prefill("p1")]
    chosen = placer(ready)
    placement = chosen.choose_prefill(decode)
    assert placement is not None
    assert placement.worker.worker_id == "p1"
    chosen.exclude_prefill(placement, Draining("it drains"))
    placement = chosen.choose_prefill(decode)
    assert placement is not None
    assert placement.worker.worker_id == "p0"


def test_the_worker_with_copies_comes_first_unless_it_is_full() -> None:
    ready = [worker_record("busy", free_blocks=60), worker_record("free", free_blocks=100)]
    chosen = placer(ready)
    chosen.replica = incarnation_of(ready[0])
    placement = chosen.choose("decode", (), None)
    assert placement is not None
    assert (placement.worker.worker_id, "copies" in placement.why) == ("busy", True)
    full = [worker_record("busy", free_blocks=0), ready[1]]
    chosen = placer(full)
    chosen.replica = incarnation_of(full[0])
    placement = chosen.choose("decode", (), None)
    assert placement is not None
    assert placement.worker.worker_id == "free"
