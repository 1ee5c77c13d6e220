"""One prompt on a prefill worker that is scored or pooled: log-probabilities or its embedding, and no output."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvtransfer.handover.send_path import SendStats
from kvtransfer.handover.ticket import Ticket
from pdserve.base.errors import RequestError
from pdserve.base.sampling import SamplingParams
from pdserve.base.wire import logprobs_to_wire
from pdserve.engine.step import PrefillProgress, PromptEmbedding, PromptScores
from pdserve.v1 import prefill_pb2 as pb
from pdserve.worker.serve.inboxes import Inbox
from pdserve.worker.serve.worker import KEEP_ALIVE_S, Worker
from prefill_svc.request import PrefillJob
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.session import PromptEvent, PromptStarted
from prefill_svc.spans import PromptTimes


def scoring_params(params: SamplingParams) -> SamplingParams:
    """What is reported of each token; nothing else of `params` matters. Raises `RequestError` if nothing is."""
    if params.logprobs is None:
        raise RequestError(
            "A prompt is to be scored, but sampling.logprobs is not set. Set it, 0 for no alternatives.",
            param="logprobs",
        )
    return SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=params.logprobs, logprob_token_ids=params.logprob_token_ids
    )


class ScoringSession:
    """Passes on what is reported of a prompt. However `run` ends, the prompt's blocks are freed."""

    #: There is no transfer.
    sent: SendStats | None = None

    def __init__(
        self,
        worker: Worker,
        scheduler: PrefillScheduler,
        inbox: Inbox[PromptEvent],
        write: Callable[[pb.PrefillResponse], Awaitable[None]],
        outcome: str,
    ) -> None:
        """`outcome`: for the trace."""
        self.outcome = outcome
        self._worker = worker
        self._scheduler = scheduler
        self._inbox = inbox
        self._write = write
        #: What happened when, so far.
        self.times = PromptTimes(accepted=_now())

    async def run(self, job: PrefillJob, ticket: Ticket | None) -> None:
        """Raises `RequestError` with a ticket, else the error that ended the prompt."""
        if ticket is not None or job.forced_first_tokens:
            raise RequestError(f"A prompt that is {self.outcome} has no output. Send no ticket and no first tokens.")
        request_id = self._inbox.request_id
        try:
            await self._worker.run(lambda: self._scheduler.add(job))
            await self._pass_on(len(job.prompt_token_ids))
        finally:
            await self._worker.run(lambda: self._scheduler.release(request_id), ends=request_id)

    async def _pass_on(self, num_prompt: int) -> None:
        times, num_computed, num_cached, num_chunks = self.times, 0, 0, 0
        while num_computed < num_prompt:
            match await self._inbox.next(timeout_s=KEEP_ALIVE_S):
                case PromptStarted(started_at=started_at, num_cached=num_cached):
                    times.started = started_at
                    await self._send_progress(num_cached, num_cached)
                case PromptEmbedding(values=values):
                    await self._write(pb.PrefillResponse(embedding=pb.PromptEmbedding(values=values)))
                case PromptScores(first=first, logprobs=logprobs):
                    scores = pb.PromptLogprobs(first_index=first, logprobs=map(logprobs_to_wire, logprobs))
                    await self._write(pb.PrefillResponse(prompt_logprobs=scores))
                case PrefillProgress(num_computed=num_computed):
                    num_chunks += 1
                    times.add_chunk(_now(), num_computed)
                    await self._send_progress(num_computed, num_cached)
                case None:
                    if not self._worker.is_hung:
                        await self._send_progress(num_computed, num_cached)
        times.computed = _now()
        queue_s, compute_s = times.started - times.accepted, times.computed - times.started
        done = pb.PrefillDone(queue_s=queue_s, compute_s=compute_s, chunks=num_chunks, cached_tokens=num_cached)
        await self._write(pb.PrefillResponse(done=done))

    async def _send_progress(self, num_computed: int, num_cached: int) -> None:
        started = self.times.started
        progress = pb.PrefillProgress(
            queued=not started,
            computed_tokens=num_computed,
            cached_tokens=num_cached,
            computing_s=_now() - started if started else 0.0,
        )
        await self._write(pb.PrefillResponse(progress=progress))


def _now() -> float:
    return asyncio.get_running_loop().time()
