"""Deliveries of two workers to one client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pdserve.base.ids import RequestId, RouterId
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams
from pdserve.base.wire import sampling_to_wire, tokens_to_wire
from pdserve.model.tokenizer_file import read_tokenizer
from pdserve.v1 import common_pb2
from router_svc.generation import Generation, TextRules
from router_svc.records.journal import Journal
from router_svc.request.context import RequestContext
from router_svc.request.output import ChoiceDelta, Output
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
    journal = cast(Journal, SimpleNamespace(produced=lambda completion_tokens: None))
    return RequestContext(
        generation=generation,
        hashes=PrefixHashes(generation.prompt, generation.cache_salt),
        cluster=cast(Any, None),
        journal=journal,
        output=Output(generation, read_tokenizer(model_dir)),
        stream=DeltaStream([journal], lambda _: None),
        sampling=sampling_to_wire(sampling),
        prompt=QueuedPrompt(InFlight(RouterId("me"))),
    )


def message(text: str, first: int, finish: FinishReason | None = None) -> list[common_pb2.ChoiceTokens]:
    tokens = ChoiceTokens(choice_index=0, first_index=first, token_ids=tuple(tokens_of(text)), finish_reason=finish)
    return [tokens_to_wire(tokens)]


async def test_a_request_is_finished_once_its_last_tokens_are_written(model_dir: Path) -> None:
    """A slow write of the first token does not end the request while the last tokens wait for it."""
    context = new_context(model_dir)
    readable, written = asyncio.Event(), []

    async def write(deltas: list[ChoiceDelta]) -> None:
        await readable.wait()
        assert not context.finished.is_set()
        written.extend(delta.text for delta in deltas)

    async with asyncio.TaskGroup() as group:
        group.create_task(context.stream.write_to(write))
        await asyncio.sleep(0)
        first = group.create_task(context.deliver(message("H", 0), None))
        group.create_task(context.deliver(message("ello", 1, FinishReason.LENGTH), None))
        await asyncio.sleep(0)
        assert context.output.is_finished
        readable.set()
        await first
        await context.finished.wait()
        await context.stream.end()
    assert written == ["H", "ello"]
