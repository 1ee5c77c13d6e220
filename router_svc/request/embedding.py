"""The embedding of a prompt: a call to a prefill worker, and to another one where that fails."""

from __future__ import annotations

from contextlib import aclosing
from math import isfinite

from pdserve.base.errors import PeerLost, TransferError
from pdserve.base.pooling import Pooling
from pdserve.base.sampling import POOLING_VERSION, SamplingParams
from pdserve.base.vectors import floats
from router_svc.records.events import PrefillScored
from router_svc.request.prompt_attempts import PromptAttempts
from router_svc.routing.placement import Placement

_NO_OUTPUT = SamplingParams(temperature=0.0, max_tokens=1)


class Embedding(PromptAttempts[bytes]):
    """Pools the prompt of one request, which has no output."""

    version = POOLING_VERSION
    no_workers = "No prefill worker is ready that can compute embeddings. Start one, or update those that run."

    async def run(self) -> None:
        """Returns when the client has the embedding. Raises the error for the client."""
        if not self._prompt.generation.needs_whole_prompt:
            await self._prompt.placer.look_up()
        values = await self._result()
        self._prompt.journal.append(PrefillScored(has_output=False))
        self._prompt.delivery.embedding(values)

    async def _attempt(self, placement: Placement) -> bytes:
        values = b""
        request = self._prompt.messages.without_output(_NO_OUTPUT, pooling=self._pooling)
        async with aclosing(self._events(placement, request, scores=False)) as events:
            async for event in events:
                if event.HasField("embedding"):
                    values = event.embedding.values
        if not values:
            raise PeerLost(
                f"Prefill worker {placement.worker.worker_id} ended the stream before the prompt was pooled."
            )
        self._require_plausible(values)
        self._prompt.queued.mark_computed()
        return values

    @property
    def _pooling(self) -> Pooling:
        pooling = self._prompt.generation.pooling
        assert pooling is not None, "only prompts that are pooled come here"
        return pooling

    def _require_plausible(self, values: bytes) -> None:
        """Raises `TransferError` for what no worker of ours sends."""
        expected = self._pooling.dimensions
        if len(values) != 4 * expected or not all(map(isfinite, floats(values))):
            raise TransferError(
                f"A worker sent an embedding of {len(values)} bytes, where {expected} finite numbers are expected."
            )
