"""The plan of faults: seeded, with kills for a third of it, and never against the last worker that is ready."""

from __future__ import annotations

from itertools import islice

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.chaos.config import ChaosConfig, parse_kinds
from pdserve.cli.chaos.faults import AFTER_REDIS_S, KINDS, Fault, Target, plan, victims
from pdserve.cli.chaos.workload import burst, distinct_requests, is_long, sendings

NAMES = ("decode-0", "decode-1", "prefill-0", "prefill-1", "redis", "router-0", "router-1")


def targets(*not_ready: str) -> list[Target]:
    return [Target(name=name, tier=name.partition("-")[0], is_ready=name not in not_ready) for name in NAMES]


def hit(
    kind: str, *not_ready: str, choice: float = 0.0, since_redis_s: float = 1e9, streams_have_routers: bool = True
) -> list[str]:
    fault = Fault(at_s=0, kind=kind, choice=choice)
    return victims(fault, targets(*not_ready), since_redis_s=since_redis_s, streams_have_routers=streams_have_routers)


def test_a_seed_repeats_the_plan_and_the_requests() -> None:
    def everything(seed: int) -> tuple[object, ...]:
        requests = distinct_requests(seed, 30, max_output_len=128)
        sent = [*sendings(seed, requests, 50, num_routers=2), *burst(seed, requests, 50, 4, num_routers=2)]
        return list(islice(plan(seed, interval_s=1, kinds=tuple(KINDS)), 50)), sent

    assert everything(3) == everything(3)
    assert everything(3) != everything(4)


def test_a_third_of_the_plan_are_kills_and_gaps_have_the_mean_that_was_set() -> None:
    faults = list(islice(plan(0, interval_s=0.5, kinds=tuple(KINDS)), 4000))
    assert {fault.kind for fault in faults} == set(KINDS)
    assert sum(fault.kind.startswith("kill-") for fault in faults) / 4000 == pytest.approx(1 / 3, abs=0.03)
    assert faults[-1].at_s / 4000 == pytest.approx(0.5, rel=0.1)


def test_a_kill_is_replaced_by_other_kills_and_by_no_pair() -> None:
    for fault in islice(plan(0, interval_s=1, kinds=tuple(KINDS)), 200):
        kinds = [each.kind for each in fault.instead]
        assert {each.is_kill for each in fault.instead} == {fault.is_kill}
        assert len(set(kinds)) == len(kinds) >= 3
        assert not {fault.kind, "kill-pair"} & set(kinds)


@pytest.mark.parametrize(("kind", "tier"), [("kill-decode", "decode"), ("kill-prefill", "prefill")])
def test_the_last_ready_worker_of_a_tier_is_not_killed(kind: str, tier: str) -> None:
    assert [hit(kind, choice=choice) for choice in (0.0, 0.99)] == [[f"{tier}-0"], [f"{tier}-1"]]
    assert hit(kind, f"{tier}-0", choice=0.99) == []


def test_a_pair_is_killed_even_if_it_is_the_last_one() -> None:
    assert hit("kill-pair", "decode-0", "prefill-1") == ["prefill-0", "decode-1"]


def test_no_router_is_killed_soon_after_redis_lost_its_data() -> None:
    assert hit("kill-router") == ["router-0"]
    assert hit("kill-router", since_redis_s=AFTER_REDIS_S) == []
    assert hit("kill-router", "router-1") == []


@pytest.mark.parametrize("kind", ["kill-redis", "flush-redis"])
def test_redis_loses_its_data_only_while_all_routers_run_and_every_stream_has_one(kind: str) -> None:
    assert hit(kind) == ["redis"]
    assert hit(kind, "router-1") == []
    assert hit(kind, "redis") == []
    assert hit(kind, streams_have_routers=False) == []


def test_a_stopped_process_is_not_hit_again() -> None:
    assert hit("stop-worker", "prefill-0", "prefill-1", choice=0.99) == ["decode-1"]
    assert "redis" not in {hit("descriptors", choice=n / 10)[0] for n in range(10)}


def test_the_requests_have_every_feature_between_the_lengths_of_the_issue() -> None:
    requests = distinct_requests(0, 120, max_output_len=128)
    bodies = [request.body for request in requests]
    assert all(16 <= body["max_tokens"] <= 128 for body in bodies)
    assert all(body["temperature"] == 0 or "seed" in body for body in bodies)
    seen = {name for body in bodies for name in body}
    assert seen >= {"n", "logprobs", "stop", "min_tokens", "ignore_eos", "stream", "messages", "prompt"}
    assert seen >= {"frequency_penalty", "presence_penalty", "repetition_penalty", "top_p", "top_k", "min_p"}
    assert seen >= {"response_format", "structured_outputs", "guided_choice", "tools", "thinking_token_budget"}
    assert any("thinking_token_budget" in body and "tools" in body for body in bodies)
    assert {body.get("n", 1) for body in bodies} == {1, 3}
    assert {type(body["prompt"]) for body in bodies if "prompt" in body} == {str, list}
    assert any(is_long(request) for request in requests)
    sent = sendings(0, requests, 100, num_routers=2)
    salts = {each.cache_salt for each in sent if each.cache_salt is not None}
    assert len(salts) > 50
    assert {each.router for each in sent} == {0, 1}


def test_unknown_kinds_and_a_fault_of_the_only_router_are_refused() -> None:
    assert parse_kinds("stop-worker,kill-decode") == ("kill-decode", "stop-worker")
    with pytest.raises(ValueError, match="fire is not one of kill-decode"):
        parse_kinds("fire")
    with pytest.raises(SetupError, match="--routers 2"):
        ChaosConfig(routers=1)
