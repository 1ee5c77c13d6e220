"""The log-probabilities of a prompt's tokens: a call to a prefill worker, and to another one where that fails.

If a worker fails, all scores are made again: they are exact, so a worker of the same numerics class makes the same.
"""

from __future__ import annotations

from contextlib import aclosing

from pdserve.base.errors import PeerLost, TransferError
from pdserve.base.sampling import SCORING_VERSION, SamplingParams, TokenLogprobs
from pdserve.base.wire import logprobs_from_wire
from pdserve.v1 import prefill_pb2
from router_svc.records.events import PrefillScored
from router_svc.request.output import require_numbers
from router_svc.request.prompt_attempts import PromptAttempts
from router_svc.routing.placement import Placement


class Scoring(PromptAttempts[list[TokenLogprobs]]):
    """Scores the prompt of one request, before its output."""

    version = SCORING_VERSION
    no_workers = (
        "No prefill worker is ready that can compute log-probabilities of prompts. Start one, or leave out "
        "`prompt_logprobs`, and `logprobs` with `echo`."
    )

    async def run(self) -> None:
        """Returns when the client has the scores. Raises the error for the client."""
        # The first token of a prompt has no log-probability.
        scores = await self._result() if self._num_prompt > 1 else []
        if scores:
            has_output = self._prompt.generation.sampling.max_tokens > 0
            self._prompt.journal.append(PrefillScored(has_output=has_output))
        self._prompt.delivery.scores(scores)

    async def _attempt(self, placement: Placement) -> list[TokenLogprobs]:
        scores: list[TokenLogprobs] = []
        request = self._prompt.messages.without_output(self._sampling)
        async with aclosing(self._events(placement, request, scores=True)) as events:
            async for event in events:
                if event.HasField("prompt_logprobs"):
                    self._take(scores, event.prompt_logprobs)
        if len(scores) != self._num_prompt - 1:
            raise PeerLost(
                f"Prefill worker {placement.worker.worker_id} ended the stream before the prompt was scored."
            )
        self._prompt.queued.mark_computed()
        return scores

    @property
    def _sampling(self) -> SamplingParams:
        generation = self._prompt.generation
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=generation.prompt_logprobs,
            logprob_token_ids=generation.sampling.logprob_token_ids,
        )

    def _take(self, scores: list[TokenLogprobs], chunk: prefill_pb2.PromptLogprobs) -> None:
        """Adds the scores of a chunk. Raises `TransferError` for what no worker of ours sends."""
        if chunk.first_index != len(scores) + 1 or chunk.first_index + len(chunk.logprobs) > self._num_prompt:
            raise TransferError(
                f"A worker sent log-probabilities of {len(chunk.logprobs)} prompt tokens from token "
                f"{chunk.first_index}, where token {len(scores) + 1} of {self._num_prompt} is next."
            )
        entries = [logprobs_from_wire(entry) for entry in chunk.logprobs]
        require_numbers(entries)
        if any(len(entry.top_ids) >= self._sampling.num_logprobs for entry in entries):
            raise TransferError("A worker sent more log-probabilities of a token than were requested.")
        scores += entries
