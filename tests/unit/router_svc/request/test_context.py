"""Deliveries of two workers to one client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.base.errors import TransferError
from pdserve.base.ids import RequestId, RouterId
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams
from pdserve.base.wire import sampling_to_wire, tokens_to_wire
from pdserve.model.tokenizer_file import read_tokenizer
from pdserve.v1 import common_pb2
from router_svc.generation import Generation, TextRules
from router_svc.records.journal import Journal
from router_svc.request.context import RequestContext
from router_svc.request.output import ChoiceDelta, Output
from router_svc.request.placer import Placer
from router_svc.request.stream import DeltaStream
from router_svc.routing.cluster import PrefixHashes
from router_svc.routing.in_flight import InFlight, QueuedPrompt
from tests.support.tiny_model import tokens_of


def new_context(model_dir: Path) -> RequestContext:
    sampling = SamplingParams(max_tokens=5)
    request_id = RequestId("cmpl-1")
    generation = Generation(
        request_id=request_id,
        worker_request_id=request_id,
        prompt=(1,),
        sampling=sampling,
        text=TextRules(),
        endpoint="test",
    )
    output, no_cluster = Output(generation, read_tokenizer(model_dir)), cast(Any, None)
    journal = cast(Journal, SimpleNamespace(produced=lambda completion_tokens: None))
    return RequestContext(
        generation=generation,
        hashes=PrefixHashes(generation.prompt, generation.cache_salt),
        cluster=no_cluster,
        journal=journal,
        output=output,
        stream=DeltaStream([journal], lambda _: None),
        sampling=sampling_to_wire(sampling),
        prompt=QueuedPrompt(InFlight(RouterId("me"))),
        placer=Placer(generation, no_cluster, output),
    )


def message(text: str, first: int, finish: FinishReason | None = None) -> list[common_pb2.ChoiceTokens]:
    tokens = ChoiceTokens(choice_index=0, first_index=first, token_ids=tuple(tokens_of(text)), finish_reason=finish)
    return [tokens_to_wire(tokens)]


async def test_tokens_of_a_cancelled_attempt_reach_the_client_before_those_of_the_next(model_dir: Path) -> None:
    """Fails when the output has taken tokens that are lost with their attempt: the next one goes on behind them."""
    context = new_context(model_dir)
    readable, written = asyncio.Event(), list[str]()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await readable.wait()
        written.extend(delta.text for delta in deltas)

    async with asyncio.TaskGroup() as group:
        group.create_task(context.stream.write_to(write))
        group.create_task(context.deliver(message("H", 0), None))
        await asyncio.sleep(0)
        lost = group.create_task(context.deliver(message("el", 1), None))
        await asyncio.sleep(0)
        lost.cancel()
        assert len(context.output.tokens_of(0)) == 3
        await context.deliver(message("lo", 3, FinishReason.LENGTH), None)
        assert context.finished.is_set()
        context.stream.end()
        readable.set()
    assert written == ["H", "el", "lo"]


async def test_a_request_is_finished_although_its_last_delivery_is_cancelled(model_dir: Path) -> None:
    """Fails when the next worker is asked for more of choices that are all complete, and refuses that."""
    context = new_context(model_dir)
    async with asyncio.TaskGroup() as group:
        for index in range(20):  # Nothing is written, so the stream is full.
            context.stream.push([ChoiceDelta(choice_index=0, text=str(index))])
        last = group.create_task(context.deliver(message("Hello", 0, FinishReason.LENGTH), None))
        await asyncio.sleep(0)
        assert not last.done()
        last.cancel()
    assert context.finished.is_set()


async def test_tokens_before_those_that_no_worker_sends_reach_the_client(model_dir: Path) -> None:
    """Fails when they count as sent, and are lost with the worker."""
    context, written = new_context(model_dir), list[str]()
    skipped = [*message("H", 0), *message("o", 4)]

    async def write(deltas: list[ChoiceDelta]) -> None:
        written.extend(delta.text for delta in deltas)

    async with asyncio.TaskGroup() as group:
        group.create_task(context.stream.write_to(write))
        with pytest.raises(TransferError, match="skipped"):
            await context.deliver(skipped, None)
        context.stream.end()
    assert written == ["H"]
