"""The summary: which requests a fault hit, how long they paused, and what is wrong."""

from __future__ import annotations

from typing import Any

from pdserve.cli.chaos.answers import Answer, Choice
from pdserve.cli.chaos.leaks import FD_SLACK, Footprint, grown, held_blocks
from pdserve.cli.chaos.outcome import COMPLETE, FAILED, LEFT, Injected, Outcome
from pdserve.cli.chaos.report import distribution, hits, judge, pauses, summarize, workers_at
from pdserve.cli.chaos.workload import COMPLETIONS, ChaosRequest, Sending


def decision(at: float, tier: str, worker: str, attempt: int) -> dict[str, Any]:
    return {"at": at, "attempt": attempt, "tier": tier, "worker": worker}


TRACE: dict[str, object] = {
    "accepted_at": 100.0,
    "retries": [{"reason": "peer_lost"}],
    "decisions": [
        decision(0.1, "decode", "decode-0", 1),
        decision(0.2, "prefill", "prefill-1", 1),
        decision(3.1, "decode", "decode-1", 2),
    ],
}


def outcome(text: str = "abc", status: str = COMPLETE, number: int = 5) -> Outcome:
    request = ChaosRequest(index=0, path=COMPLETIONS, body={"prompt": "secret", "max_tokens": 16})
    return Outcome(
        sending=Sending(number=number, request=request, cache_salt=None, router=1),
        request_id=f"c-{number}",
        started_at=100.0,
        ended_at=106.0,
        status=status,
        error="HTTP 503" if status == FAILED else None,
        answer=answer(text, is_complete=status == COMPLETE),
        token_times=[101.0, 102.0, 105.0],
        routers=[(100.0, 1)],
        trace=TRACE,
    )


def answer(text: str, *, is_complete: bool = True) -> Answer:
    return Answer(choices={0: Choice(text=text)}, usages=[(3, 3, 0)], ids={"cmpl-1"}, is_complete=is_complete)


def fault(at: float, kind: str, target: str) -> Injected:
    return Injected(at=at, kind=kind, target=target, duration_s=0)


def test_a_request_needs_its_latest_workers_and_the_prefill_worker_until_the_first_token() -> None:
    assert workers_at(outcome(), 100.5) == {"router-1", "decode-0", "prefill-1"}
    assert workers_at(outcome(), 102.5) == {"router-1", "decode-0"}
    assert workers_at(outcome(), 104) == {"router-1", "decode-1"}


def test_a_pause_is_the_time_from_a_kill_that_hit_the_request_to_its_next_token() -> None:
    injected = [
        fault(102.9, "kill-decode", "decode-1"),  # Not yet its worker.
        fault(103.0, "kill-decode", "decode-0"),
        fault(103.0, "stop-worker", "decode-0"),
        fault(104.0, "kill-router", "router-0"),
        fault(104.5, "kill-router", "router-1"),
        fault(105.5, "kill-decode", "decode-1"),  # After the last token.
    ]
    assert pauses(outcome(), injected) == [("kill-decode", 2.0), ("kill-router", 0.5)]
    clients = [fault(101, "disconnect", "5"), fault(101, "disconnect", "6")]
    assert hits(outcome(), clients) == clients[:1]


def test_percentiles_are_values_that_occurred() -> None:
    values = [n / 1000 for n in range(1, 101)]
    assert distribution(values) == {"count": 100, "p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "max_ms": 100}
    assert distribution([]) == {"count": 0}


def test_outcomes_are_judged_by_the_undisturbed_answer() -> None:
    expected = answer("abc")
    assert judge(outcome(), expected) == ("complete", None)
    assert judge(outcome("abb"), expected)[0] == "wrong"
    assert judge(outcome("ab", LEFT), expected) == ("left", None)
    assert judge(outcome("b", LEFT), expected)[0] == "wrong"
    assert judge(outcome("", FAILED), expected) == ("failed", "HTTP 503")


def test_a_failure_has_what_replays_it_and_no_prompt() -> None:
    outcomes = [outcome(), outcome("abx", number=6)]
    injected = [fault(103, "kill-decode", "decode-0"), fault(200, "kill-decode", "decode-0")]
    summary = summarize(outcomes, {0: answer("abc")}, injected=injected, skipped=["kill-pair"], started_at=99)
    counts = {"sent": 2, "complete": 1, "wrong": 1, "running_at_a_fault": 2, "needing_what_was_hit": 2}
    assert counts.items() <= summary["requests"].items()
    assert summary["faults"] == {"injected": 2, "by_kind": {"kill-decode": 2}, "not_possible_then": {"kill-pair": 1}}
    [failure] = summary["failures"]
    assert failure["number"] == 6
    assert failure["faults"] == [[4.0, "kill-decode", "decode-0", 0]]
    assert failure["fields"] == {"max_tokens": 16}
    assert summary["pause_from_kill_to_next_token"]["kill-decode"]["count"] == 2


IDLE = {
    "pdserve_kv_transfers_active": 0,
    "pdserve_kv_blocks_held": 0,
    "pdserve_kv_blocks_reserved": 0,
    "pdserve_num_requests_running": 0,
    "pdserve_num_requests_waiting": 0,
    "pdserve_kv_blocks_free": 8,
    "pdserve_kv_blocks": 8,
}


def test_a_block_a_transfer_and_a_request_that_are_still_held_are_found() -> None:
    def found(**changes: int) -> list[str]:
        return held_blocks("".join(f"{name} {value}\n" for name, value in (IDLE | changes).items()))

    assert found() == []
    assert found(pdserve_kv_blocks_free=7) == ["7 of 8 blocks are free"]
    assert found(pdserve_kv_transfers_active=1) == ["pdserve_kv_transfers_active is 1"]
    assert held_blocks("") != []


def test_growth_beyond_what_pools_explain_is_found() -> None:
    before = {"router-0": Footprint(fds=20, threads=10, children=1)}
    assert grown(before, {"router-0": Footprint(fds=20 + FD_SLACK, threads=10, children=1)}) == []
    assert grown(before, {"router-0": Footprint(fds=21 + FD_SLACK, threads=10, children=1)})
    assert grown(before, {"router-0": Footprint(fds=20, threads=10, children=2)})
