"""The embedding of a prompt: a call to a prefill worker, and to another one where that fails."""

from __future__ import annotations

from contextlib import aclosing
from math import isfinite

from pdserve.base.errors import PeerLost, TransferError
from pdserve.base.pooling import Pooling
from pdserve.base.sampling import POOLING_VERSION, SamplingParams
from pdserve.base.vectors import floats
from pdserve.base.wire import pooling_to_wire, sampling_to_wire
from pdserve.v1 import prefill_pb2
from router_svc.request.output import ChoiceDelta
from router_svc.request.prompt_attempts import PromptAttempts
from router_svc.routing.placement import Placement

_NO_OUTPUT = SamplingParams(temperature=0.0, max_tokens=1)


class Embedding(PromptAttempts[bytes]):
    """Pools the prompt of one request, which has no output."""

    version = POOLING_VERSION
    no_workers = "No prefill worker is ready that can compute embeddings. Start one, or update those that run."

    async def run(self) -> None:
        """Returns when the client has the embedding. Raises the error for the client."""
        context = self._context
        if not context.generation.needs_whole_prompt:
            await context.placer.look_up(context.hashes)
        values = await self._result()
        context.journal.scored(has_output=False)
        delta = ChoiceDelta(choice_index=0, text="", embedding=values)
        context.stream.push([delta], first_choice=context.generation.first_choice)

    async def _attempt(self, placement: Placement) -> bytes:
        values = b""
        async with aclosing(self._events(placement, self._request(), scores=False)) as events:
            async for event in events:
                if event.HasField("embedding"):
                    values = event.embedding.values
        if not values:
            raise PeerLost(
                f"Prefill worker {placement.worker.worker_id} ended the stream before the prompt was pooled."
            )
        self._require_plausible(values)
        self._context.prompt.mark_computed()
        return values

    @property
    def _pooling(self) -> Pooling:
        pooling = self._context.generation.pooling
        assert pooling is not None, "only prompts that are pooled come here"
        return pooling

    def _request(self) -> prefill_pb2.PrefillRequest:
        generation = self._context.generation
        return prefill_pb2.PrefillRequest(
            ref=self._context.ref(),
            prompt_token_ids=generation.prompt,
            sampling=sampling_to_wire(_NO_OUTPUT),
            cache_salt=generation.cache_salt,
            pooling=pooling_to_wire(self._pooling),
        )

    def _require_plausible(self, values: bytes) -> None:
        """Raises `TransferError` for what no worker of ours sends."""
        expected = self._pooling.dimensions
        if len(values) != 4 * expected or not all(map(isfinite, floats(values))):
            raise TransferError(
                f"A worker sent an embedding of {len(values)} bytes, where {expected} finite numbers are expected."
            )
