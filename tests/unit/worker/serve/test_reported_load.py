"""The load that routers see."""

from __future__ import annotations

from pdserve.base.ids import RouterId
from pdserve.engine.pace import Pace
from pdserve.engine.step import Load
from pdserve.peers.workers import WorkerLoad
from pdserve.worker.serve.announce import reported_load

LOAD = Load(
    num_running=3,
    num_waiting=2,
    num_held=1,
    queued_prompt_tokens=700,
    queued_by_router={RouterId("me"): 600},
    free_blocks=40,
    total_blocks=64,
    reserved_blocks=4,
    waiting_blocks=3,
    num_preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
)
PACE = Pace(decode_step_s=0.020, prefill_token_s=0.0013)


def test_before_the_first_prompt_no_rate_is_reported() -> None:
    assert reported_load(LOAD, None, 0.05) == WorkerLoad(
        running=3, waiting=2, queued_tokens=700, queued_by_router={RouterId("me"): 600}, free_blocks=40
    )


def test_only_a_tier_that_decodes_reports_a_rate_while_decoding() -> None:
    decode, prefill = reported_load(LOAD, PACE, 0.05), reported_load(LOAD, PACE, None)
    assert (decode.prefill_tokens_per_s, decode.prefill_tokens_per_s_while_decoding) == (769.0, 462.0)
    assert (prefill.prefill_tokens_per_s, prefill.prefill_tokens_per_s_while_decoding) == (769.0, None)
