"""The message that starts a request on a decode worker."""

from __future__ import annotations

from pdserve.base.tracing.context import TraceContext, traceparent_of
from pdserve.v1 import decode_pb2
from router_svc.request.context import RequestContext


def decode_start(
    context: RequestContext, threshold: int, trace: TraceContext | None, *, is_moving: bool = False
) -> decode_pb2.DecodeStart:
    """The request with the output that its client has. `threshold`: uncached tokens that are computed there."""
    return decode_pb2.DecodeStart(
        ref=context.ref(),
        prompt_token_ids=context.generation.prompt,
        sampling=context.sampling,
        local_prefill_threshold=threshold,
        cache_salt=context.generation.cache_salt,
        traceparent=traceparent_of(trace),
        output=[
            decode_pb2.ChoiceOutput(choice_index=each.choice_index, token_ids=each.token_ids, is_over=each.is_over)
            for each in context.output.continuation
        ],
        is_moving=is_moving,
    )
