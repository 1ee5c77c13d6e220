"""The decision record of a request without faults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router_svc.request import decode_attempt
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.request.support import (
    TOKENS,
    after_first_token,
    go_on,
    once_known,
    states,
)
from tests.integration.router_svc.script import Context, Fault, hang, vanish


async def test_a_request_without_faults_has_every_phase_in_order(cluster: ScriptedCluster) -> None:
    # As with real steps, the prefill worker has sent everything before the decode worker's first token.
    cluster.script.fail("decode_token", once_known(cluster, lambda record: "sent_bytes" in record["reported"], go_on))
    await cluster.complete()
    record = await cluster.only_trace()
    phases = record["phases"]
    on_prefill = ["admitted", "reserved", "prefill_start", "first_token", "first_write", "finish"]
    on_decode = ["admitted", "reserved", "commit", "first_decode", "finish"]
    assert set(phases) == {*on_prefill, *on_decode}
    for order in (on_prefill, on_decode):
        times = [phases[name] for name in order]
        assert times == sorted(times)
    assert record["state"] == "finished"
    assert record["attempt"] == 1
    assert record["prefilled_by"] == "prefill"
    assert record["outcome"] == {
        "finish_reasons": ["stop"],
        "error": None,
        "completion_tokens": len(TOKENS),
        "cached_tokens": 0,
    }
    assert states(record) == [("decode", 1), ("prefill", 1)]
    assert record["retries"] == record["fallbacks"] == []
    assert record["reported"]["reserve_s"] == 0.125
    assert record["reported"]["prefill_compute_s"] == 1.5
    assert record["reported"]["exposed_s"] == 0.25
    assert record["reported"]["sent_bytes"] == 4096
    assert record["chunks"][0]["computed_tokens"] == 9


async def _complete_before(cluster: ScriptedCluster, fault: Fault) -> dict[str, Any]:
    """The record of a request whose prefill worker meets `fault` once it has committed and the output is complete."""
    is_complete = asyncio.Event()

    async def late(context: Context) -> None:
        await is_complete.wait()
        await fault(context)

    cluster.script.fail("prefill_committed", late)
    async with cluster.client() as client:
        async for chunk in await client.completions.create(model="tiny", prompt="Say hello", stream=True):
            if chunk.choices[0].finish_reason is not None:
                is_complete.set()
    record = await cluster.only_trace()
    assert (record["state"], record["outcome"]["completion_tokens"]) == ("finished", len(TOKENS))
    return record


async def test_an_output_that_is_complete_waits_for_the_report_of_its_transfer(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attempt, "_REPORT_TIMEOUT_S", 20.0)  # A busy machine may take longer than 0.1 s.
    record = await _complete_before(cluster, go_on)
    assert record["reported"]["sent_bytes"] == 4096


async def test_first_tokens_that_complete_the_output_after_all_others_do_not_end_the_call(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attempt, "_REPORT_TIMEOUT_S", 20.0)
    cluster.script.tokens_per_message = len(TOKENS)

    async def after_decoding(context: Context) -> None:
        [is_committed] = cluster.calls.commits.values()
        is_committed.set()
        await once_known(cluster, lambda record: "first_decode" in record["phases"], go_on)(context)

    cluster.script.fail("prefill_token", after_decoding)
    await cluster.complete()
    record = await cluster.only_trace()
    assert (record["state"], record["outcome"]["completion_tokens"]) == ("finished", len(TOKENS))
    assert record["reported"]["sent_bytes"] == 4096


@pytest.mark.parametrize("fault", [hang, vanish])
async def test_an_output_that_is_complete_does_without_the_report(cluster: ScriptedCluster, fault: Fault) -> None:
    record = await _complete_before(cluster, fault)
    assert "sent_bytes" not in record["reported"]


async def _adds_up(cluster: ScriptedCluster, record: dict[str, Any]) -> dict[str, float]:
    """Checks that the phases of the only request add up to its latency, in its record and in the metrics."""
    seconds: dict[str, float] = record["seconds_in"]
    assert sum(seconds.values()) == pytest.approx(record["phases"]["finish"], abs=1e-5)
    for phase, spent in seconds.items():
        assert await cluster.metric("request_phase_seconds_sum", phase=phase) == pytest.approx(spent, abs=1e-5)
        assert await cluster.metric("request_phase_seconds_count", phase=phase) == 1
    return seconds


async def test_the_phases_of_a_request_add_up_to_its_latency(cluster: ScriptedCluster) -> None:
    await cluster.complete()
    record = await cluster.only_trace()
    seconds = await _adds_up(cluster, record)
    assert list(seconds) == ["queue", "reserve", "prefill", "wire", "decode"]
    assert seconds["queue"] == pytest.approx(record["phases"]["admitted"], abs=1e-5)
    assert sum(seconds.values()) == pytest.approx(await cluster.metric("e2e_request_latency_seconds_sum"), abs=1e-5)


async def test_the_phases_of_a_request_that_was_retried_twice_add_up(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill", vanish)
    cluster.script.fail("decode_token", None, after_first_token(cluster, vanish))
    status, _ = await cluster.complete()
    assert status == 200
    record = await cluster.only_trace()
    assert len(record["retries"]) == 2
    await _adds_up(cluster, record)


async def test_a_request_for_one_token_spends_nothing_on_the_wire(cluster: ScriptedCluster) -> None:
    await cluster.complete(max_tokens=1)
    seconds = await _adds_up(cluster, await cluster.only_trace())
    assert seconds["wire"] == seconds["decode"] == 0.0
    assert seconds["prefill"] > 0.0


async def test_a_prompt_counts_on_arrival_even_if_it_is_refused(cluster: ScriptedCluster) -> None:
    await cluster.complete(prompt=["Say hello", "Say it"])
    received = await cluster.metric("requests_received_total")
    tokens = await cluster.metric("received_prompt_tokens_total")
    assert (received, tokens) == (2, await cluster.metric("prompt_tokens_total"))
    assert await cluster.metric("received_uncached_tokens_total") == tokens
    cluster.router.models.first.requests.drain()
    status, _ = await cluster.complete()
    assert status == 503
    assert await cluster.metric("requests_received_total") == 3
    assert await cluster.metric("received_prompt_tokens_total") > tokens
