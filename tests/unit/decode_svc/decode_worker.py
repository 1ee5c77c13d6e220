"""A decode scheduler with a fake model, stepped by hand, and the requests that its tests send."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.step import Grant, StepEvents
from tests.unit.engine.fakes import BLOCK_SIZE, KEY, FakeDecoder, Worker, expected, limits, write_prompt

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ALWAYS = 2**32 - 1
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@dataclass
class DecodeWorker(Worker):
    """A decode worker whose scheduler is checked after every step."""

    scheduler: DecodeScheduler

    def step(self) -> StepEvents:
        events = super().step()
        self.scheduler.check_integrity()
        return events

    def grant(self, request_id: RequestId) -> Grant:
        """Step until the request has its grant."""
        while self.scheduler.has_work():
            for grant in self.step().grants:
                if grant.request_id == request_id:
                    return grant
        raise AssertionError(f"{request_id} got no grant")

    def deliver(self, job: DecodeJob) -> Grant:
        """Reserve blocks for a request, write its KV to them, and activate it."""
        self.scheduler.reserve(job)
        grant = self.grant(job.request_id)
        write_prompt(self.cache, grant.block_tables[0], grant.num_cached_blocks, job.prompt_token_ids)
        self.scheduler.activate(job.request_id, first_tokens(job))
        return grant

    @property
    def all_free(self) -> bool:
        return self.pool.num_free == self.pool.num_blocks


def decode(num_blocks: int = 32, *, decoder: FakeDecoder | None = None, **config: float) -> DecodeWorker:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, replace(DecodeSchedulerConfig(limits=limits()), **config))
    return DecodeWorker(pool=pool, scheduler=scheduler, decoder=decoder or FakeDecoder())


def running(prompt: list[int], params: SamplingParams, tokens: int) -> DecodeWorker:
    """A worker that has sampled `tokens` tokens of each choice of request A."""
    worker = decode(40)
    worker.scheduler.reserve(job(A, prompt, params, threshold=ALWAYS))
    while len(worker.tokens(A)) < tokens:
        worker.step()
    return worker


def job(request_id: RequestId, prompt: list[int], params: SamplingParams = GREEDY, *, threshold: int = 0) -> DecodeJob:
    return DecodeJob(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        hash_key=KEY,
        local_prefill_threshold=threshold,
    )


def first_tokens(of: DecodeJob) -> list[int]:
    return [expected(of.prompt_token_ids, of.params, choice, limits())[0] for choice in range(of.params.n)]


def oracle(prompt: list[int], params: SamplingParams = GREEDY, choice: int = 0) -> list[int]:
    return expected(prompt, params, choice, limits())


def sizes(worker: DecodeWorker) -> list[dict[RequestId, int]]:
    """Tokens of each request in each step, until no work is left."""
    result = []
    while worker.scheduler.has_work():
        worker.step()
        plan = worker.plans[-1]
        chunks = {chunk.sequence.request_id: chunk.stop - chunk.start for chunk in plan.chunks}
        result.append({sequence.request_id: 1 for sequence in plan.decoding} | chunks)
    return result
