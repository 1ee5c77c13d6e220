from __future__ import annotations

from pdserve.base.ids import RouterId
from pdserve.base.workers import WorkerLoad
from pdserve.engine.pace import Pace
from pdserve.engine.step import Load
from pdserve.worker.serve.process import reported_load

LOAD = Load(
    num_running=3,
    num_waiting=2,
    num_held=1,
    queued_prompt_tokens=700,
    queued_by_router={RouterId("me"): 600},
    free_blocks=40,
    total_blocks=64,
    num_preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
)
PACE = Pace(decode_step_s=0.020, prefill_token_s=0.0013)


def test_a_worker_that_computed_no_prompt_reports_no_rate() -> None:
    assert reported_load(LOAD, None, 0.05) == WorkerLoad(
        running=3, waiting=2, queued_tokens=700, queued_by_router={RouterId("me"): 600}, free_blocks=40
    )


def test_only_where_sequences_decode_there_is_a_rate_beside_them() -> None:
    decode, prefill = reported_load(LOAD, PACE, 0.05), reported_load(LOAD, PACE, None)
    assert (decode.prefill_tokens_per_s, decode.prefill_tokens_per_s_beside_decoding) == (769.0, 462.0)
    assert (prefill.prefill_tokens_per_s, prefill.prefill_tokens_per_s_beside_decoding) == (769.0, None)
