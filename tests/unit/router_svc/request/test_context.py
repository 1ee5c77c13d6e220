"""Deliveries of two workers to one client, and losses of workers that a request has met."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.base.errors import PdserveError, PeerLost
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
from tests.support.records import worker_record
from tests.support.tiny_model import tokens_of


def new_context(model_dir: Path, cluster: object = None) -> RequestContext:
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
    journal = cast(
        Journal, SimpleNamespace(produced=lambda completion_tokens: None, lost_worker=lambda worker, remark: None)
    )
    return RequestContext(
        generation=generation,
        hashes=PrefixHashes(generation.prompt, generation.cache_salt),
        cluster=cast(Any, cluster),
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


async def lose_workers(context: RequestContext, losses: int) -> None:
    for epoch in range(losses):
        error = PeerLost("Lost decode worker decode-0: it closed the connection.")
        error.__cause__ = ConnectionResetError()
        await context.note_failure(worker_record("decode-0", epoch=epoch), error)


def cluster_with(worker_seconds: float) -> SimpleNamespace:
    """Workers have been ready for so long when the request has had them for ten seconds."""

    async def requests_of_death(worker_id: object, epoch: object) -> None:
        return None

    directory = SimpleNamespace(mark_lost=lambda worker_id, epoch: None)
    return SimpleNamespace(directory=directory, ready_seconds=worker_seconds, requests_of_death=requests_of_death)


def was_on_workers(context: RequestContext, seconds: float) -> None:
    ticks = count(0.0, seconds)
    with context.presence.on_worker(lambda: next(ticks)):
        pass


async def test_a_request_under_which_six_workers_are_killed_at_once_each_time_ends(model_dir: Path) -> None:
    context = new_context(model_dir, cluster_with(worker_seconds=100.0))
    was_on_workers(context, 10.0)
    await lose_workers(context, 5)
    with pytest.raises(PdserveError, match="0 failed by themselves while they computed it, 6 were lost"):
        await lose_workers(context, 1)


async def test_losses_that_the_time_on_workers_explains_do_not_end_a_request(model_dir: Path) -> None:
    """Fails when six losses end it: each kill of one of two workers meets every second request."""
    context = new_context(model_dir, cluster_with(worker_seconds=15.0))
    was_on_workers(context, 10.0)
    await lose_workers(context, 15)
    assert context.deaths.is_alone
    with pytest.raises(PdserveError, match="too many workers"):
        await lose_workers(context, 15)


def test_a_prompt_is_not_handed_over_from_a_worker_to_itself(model_dir: Path) -> None:
    """The decode worker may take the role of a prefill worker after it was chosen."""
    ready = [worker_record("one", tier="prefill"), worker_record("two", tier="prefill")]
    cluster = SimpleNamespace(ready=lambda tier, layout: ready, in_flight=InFlight(RouterId("me")))
    context = new_context(model_dir, cluster)
    for decode, other in (("one", "two"), ("two", "one")):
        placement = context.choose_prefill(worker_record(decode))
        assert placement is not None
        assert placement.worker.worker_id == other
    del ready[1]
    assert context.choose_prefill(worker_record("one")) is None
