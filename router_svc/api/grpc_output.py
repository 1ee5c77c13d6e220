"""Output as messages of the gRPC API, each with the position behind it where streams can be resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from pdserve.base.errors import TransferTimeout
from pdserve.base.wire import logprobs_to_wire
from pdserve.v1 import inference_pb2 as pb
from router_svc.api.event_ids import EventIds
from router_svc.generation import Generation
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import WRITE_TIMEOUT_S, DeltaSource, TokenUsage


async def send(
    context: grpc.aio.ServicerContext[Any, Any],
    generation: Generation,
    stream: DeltaSource,
    ids: EventIds | None,
    prompt_token_ids: Sequence[int] = (),
) -> None:
    """Writes the output of a generation, and its usage. Raises `TransferTimeout` for a client that does not read.

    The first message has `prompt_token_ids`.
    """
    request_id = generation.request_id
    first = [prompt_token_ids]

    async def write(deltas: list[ChoiceDelta]) -> None:
        message = pb.GenerateResponse(request_id=request_id, prompt_token_ids=first.pop() if first else ())
        if (scores := deltas[0].prompt_logprobs) is not None:  # All choices have the same.
            message.prompt_logprobs.extend(map(logprobs_to_wire, scores))
            await context.write(message)
            return
        for delta in deltas:
            position = "" if ids is None else ids.after(delta)
            if position is not None:  # None: the client has this delta.
                message.choices.append(_choice(delta))
                message.position = position
        if message.choices:
            await context.write(message)
            stream.first_write()

    try:
        await stream.write_to(write)
    except ConnectionResetError as error:
        raise TransferTimeout(f"The client has disconnected: {error}.") from None
    position = "" if ids is None else ids.usage()
    if position is not None:
        await _write_usage(context, request_id, stream.usage, position)


async def _write_usage(
    context: grpc.aio.ServicerContext[Any, Any], request_id: str, usage: TokenUsage, position: str
) -> None:
    """Writes the last message. Raises `TransferTimeout` when the client does not take it."""
    message = pb.Usage(
        prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens, cached_tokens=usage.cached_tokens
    )
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(pb.GenerateResponse(request_id=request_id, usage=message, position=position))
    except TimeoutError:
        raise TransferTimeout(f"The client has read nothing for {WRITE_TIMEOUT_S:g} s.") from None


def _choice(delta: ChoiceDelta) -> pb.GenerateChoice:
    return pb.GenerateChoice(
        choice_index=delta.choice_index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[logprobs_to_wire(entry) for entry in delta.logprobs],
        finish_reason=delta.finish_reason.value if delta.finish_reason else "",
    )
