"""The decision record of a request without faults."""

from __future__ import annotations

from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.request.support import (
    TOKENS,
    go_on,
    once_known,
    states,
)


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
