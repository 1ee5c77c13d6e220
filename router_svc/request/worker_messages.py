"""The messages by which workers get a prompt."""

from __future__ import annotations

import time

from pdserve.base.pooling import Pooling
from pdserve.base.sampling import MAX_FORCED, SamplingParams
from pdserve.base.trace_context import TraceContext, traceparent_of
from pdserve.base.wire import pooling_to_wire, sampling_to_wire
from pdserve.peers.workers import WorkerRecord
from pdserve.v1 import common_pb2, decode_pb2, prefill_pb2
from router_svc.generation import Generation, is_best_effort
from router_svc.records.journal import Journal
from router_svc.request.output import Output
from router_svc.request.placer import Placer


class WorkerMessages:
    """Makes the messages of one prompt, for its current attempt and behind the output so far."""

    def __init__(
        self, generation: Generation, output: Output, journal: Journal, placer: Placer, router_id: str
    ) -> None:
        self._generation = generation
        self._output = output
        self._journal = journal
        self._placer = placer
        self._router_id = router_id
        #: When the request was admitted.
        self._started_at = time.monotonic()
        self._sampling = sampling_to_wire(generation.sampling)

    def decode(
        self, threshold: int, trace: TraceContext | None, *, source: WorkerRecord | None = None
    ) -> decode_pb2.DecodeStart:
        """The request for a decode worker. `threshold`: uncached tokens up to which that worker prefills.

        `source`: the worker that the request leaves, and that sends the blocks; None: prefill workers send them.
        """
        is_moving = source is not None
        output = [
            decode_pb2.ChoiceOutput(choice_index=each.choice_index, token_ids=each.token_ids, is_over=each.is_over)
            for each in self._output.continuation
        ]
        if is_moving and self._generation.sampling.grammar:
            # The worker that the request leaves sends their blocks. Those forced last may not be computed there.
            for each in output:
                del each.token_ids[max(1, len(each.token_ids) - MAX_FORCED) :]
        return decode_pb2.DecodeStart(
            ref=self._ref(),
            prompt_token_ids=self._generation.prompt,
            sampling=self._sampling,
            local_prefill_threshold=threshold,
            cache_salt=self._generation.cache_salt,
            traceparent=traceparent_of(trace),
            output=output,
            is_moving=is_moving,
            senders_ask=self._placer.senders_ask if source is None else source.asks_for_addresses,
        )

    def prefill(self, ticket: decode_pb2.Ticket | None) -> prefill_pb2.PrefillRequest:
        """The prompt for a prefill worker, which retains its blocks until the call ends."""
        return prefill_pb2.PrefillRequest(
            ref=self._ref(),
            prompt_token_ids=self._generation.prompt,
            sampling=self._sampling,
            ticket=ticket,
            forced_first_tokens=self._output.first_tokens,
            cache_salt=self._generation.cache_salt,
            retains_prompt=True,
        )

    def without_output(self, sampling: SamplingParams, *, pooling: Pooling | None = None) -> prefill_pb2.PrefillRequest:
        """The prompt for a prefill worker that pools it, or else scores it."""
        return prefill_pb2.PrefillRequest(
            ref=self._ref(),
            prompt_token_ids=self._generation.prompt,
            sampling=sampling_to_wire(sampling),
            cache_salt=self._generation.cache_salt,
            scores_prompt=pooling is None,
            pooling=None if pooling is None else pooling_to_wire(pooling),
        )

    def _ref(self) -> common_pb2.RequestRef:
        return common_pb2.RequestRef(
            request_id=self._generation.worker_request_id,
            attempt=self._journal.record.attempt,
            router_id=self._router_id,
            alone=self._placer.deaths.is_alone,
            best_effort=is_best_effort(self._generation.priority),
            waited_ms=int((time.monotonic() - self._started_at) * 1000),
        )
