"""A prefill scheduler with a fake model, stepped by hand, and the prompts that its tests send."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.step import StepEvents
from prefill_svc.request import PrefillJob, PrefillSchedulerConfig
from prefill_svc.scheduler import PrefillScheduler
from tests.unit.engine.fakes import BLOCK_SIZE, KEY, FakeDecoder, Worker, expected, limits

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


@dataclass
class PrefillWorker(Worker):
    """A prefill worker whose scheduler is checked after every step."""

    scheduler: PrefillScheduler

    def step(self) -> StepEvents:
        events = super().step()
        self.scheduler.check_integrity()
        return events

    def sizes(self) -> list[dict[RequestId, int]]:
        """Tokens of each request in each step."""
        return [{chunk.sequence.request_id: chunk.stop - chunk.start for chunk in plan.chunks} for plan in self.plans]


def prefill(num_blocks: int = 32, *, budget: int = 100, decoder: FakeDecoder | None = None) -> PrefillWorker:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = PrefillScheduler(pool, PrefillSchedulerConfig(limits=limits(), max_num_batched_tokens=budget))
    return PrefillWorker(pool=pool, scheduler=scheduler, decoder=decoder or FakeDecoder())


def job(request_id: RequestId, prompt: list[int], params: SamplingParams = GREEDY) -> PrefillJob:
    return PrefillJob(request_id=request_id, prompt_token_ids=prompt, params=params, hash_key=KEY)


def first_token(prompt: list[int], params: SamplingParams = GREEDY, choice: int = 0) -> int:
    return expected(prompt, params, choice, limits())[0]
