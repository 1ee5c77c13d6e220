"""Best-effort prompts: they come after all others, in steps that are short."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.pace import Pace
from tests.unit.engine.fakes import BLOCK_SIZE
from tests.unit.prefill_svc.prefill_worker import PROMPT, A, B, C, PrefillWorker, first_token, job, prefill

#: A step with best-effort prompts has 20 tokens.
PACE = Pace(prefill_token_s=1 / 200)
LONG = [12 + index % 6 for index in range(50)]


def worker_with(*, num_blocks: int = 64, budget: int = 100) -> PrefillWorker:
    worker = prefill(num_blocks, budget=budget)
    worker.pace = PACE
    return worker


def test_a_prompt_overtakes_those_that_came_earlier_and_those_being_computed() -> None:
    worker = worker_with()
    worker.scheduler.add(replace(job(A, LONG), is_best_effort=True))
    worker.step()
    worker.scheduler.add(replace(job(B, LONG[8::-1]), is_best_effort=True))
    worker.scheduler.add(job(C, PROMPT))
    worker.run()
    assert worker.sizes()[:4] == [{A: 20}, {C: 10, A: 10}, {A: 20}, {B: 9}]
    assert worker.tokens(C) == [first_token(PROMPT)]
    assert worker.tokens(A) == [first_token(LONG)]


def test_other_prompts_have_the_whole_step() -> None:
    worker = worker_with()
    worker.scheduler.add(replace(job(A, PROMPT), is_best_effort=True))
    worker.scheduler.add(job(B, LONG))
    worker.run()
    assert worker.sizes()[:2] == [{B: 50}, {A: 10}]


def test_a_prompt_that_waits_for_blocks_of_theirs_does_not_stop_them() -> None:
    worker = worker_with(num_blocks=len(LONG) // BLOCK_SIZE + 1)
    worker.scheduler.add(replace(job(A, LONG), is_best_effort=True))
    worker.step()
    worker.scheduler.add(job(B, PROMPT[::-1]))
    worker.scheduler.add(replace(job(C, PROMPT), is_best_effort=True))
    worker.run()
    assert worker.sizes() == [{A: 20}, {A: 20}, {A: 10}]
    worker.scheduler.release(A)
    worker.run()
    assert worker.sizes()[3:] == [{B: 10, C: 10}]
