"""Deliveries of two workers to one client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.base.errors import TransferError
from pdserve.base.ids import RequestId
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams
from pdserve.base.wire import tokens_to_wire
from pdserve.model.tokenizer_file import read_tokenizer
from pdserve.v1 import common_pb2
from router_svc.generation import Generation, TextRules
from router_svc.records.journal import Journal
from router_svc.request.delivery import Delivery
from router_svc.request.output import ChoiceDelta, Output
from router_svc.request.stream import DeltaStream
from tests.support.tiny_model import tokens_of


@dataclass
class Way:
    """The output of one prompt, and the stream to its client."""

    output: Output
    stream: DeltaStream
    delivery: Delivery


def new_way(model_dir: Path, *, first_choice: int = 0) -> Way:
    request_id = RequestId("cmpl-1")
    generation = Generation(
        request_id=request_id,
        worker_request_id=request_id,
        prompt=(1,),
        sampling=SamplingParams(max_tokens=5),
        text=TextRules(),
        first_choice=first_choice,
        endpoint="test",
    )
    journal = cast(Journal, SimpleNamespace(produced=lambda completion_tokens: None))
    output, stream = Output(generation, read_tokenizer(model_dir)), DeltaStream([journal], lambda _: None)
    return Way(output, stream, Delivery(generation, output, stream, journal))


def message(text: str, first: int, finish: FinishReason | None = None) -> list[common_pb2.ChoiceTokens]:
    tokens = ChoiceTokens(choice_index=0, first_index=first, token_ids=tuple(tokens_of(text)), finish_reason=finish)
    return [tokens_to_wire(tokens)]


async def test_tokens_of_a_cancelled_attempt_reach_the_client_before_those_of_the_next(model_dir: Path) -> None:
    """Fails when the output has taken tokens that are lost with their attempt: the next one goes on behind them."""
    way = new_way(model_dir)
    readable, written = asyncio.Event(), list[str]()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await readable.wait()
        written.extend(delta.text for delta in deltas)

    async with asyncio.TaskGroup() as group:
        group.create_task(way.stream.write_to(write))
        group.create_task(way.delivery.tokens(message("H", 0), None))
        await asyncio.sleep(0)
        lost = group.create_task(way.delivery.tokens(message("el", 1), None))
        await asyncio.sleep(0)
        lost.cancel()
        assert len(way.output.tokens_of(0)) == 3
        await way.delivery.tokens(message("lo", 3, FinishReason.LENGTH), None)
        assert way.delivery.finished.is_set()
        way.stream.end()
        readable.set()
    assert written == ["H", "el", "lo"]


async def test_a_request_is_finished_although_its_last_delivery_is_cancelled(model_dir: Path) -> None:
    """Fails when the next worker is asked for more of choices that are all complete, and refuses that."""
    way = new_way(model_dir)
    async with asyncio.TaskGroup() as group:
        for index in range(20):  # Nothing is written, so the stream is full.
            way.stream.push([ChoiceDelta(choice_index=0, text=str(index))])
        last = group.create_task(way.delivery.tokens(message("Hello", 0, FinishReason.LENGTH), None))
        await asyncio.sleep(0)
        assert not last.done()
        last.cancel()
    assert way.delivery.finished.is_set()


async def test_tokens_before_those_that_no_worker_sends_reach_the_client(model_dir: Path) -> None:
    """Fails when they count as sent, and are lost with the worker."""
    way, written = new_way(model_dir), list[str]()
    skipped = [*message("H", 0), *message("o", 4)]

    async def write(deltas: list[ChoiceDelta]) -> None:
        written.extend(delta.text for delta in deltas)

    async with asyncio.TaskGroup() as group:
        group.create_task(way.stream.write_to(write))
        with pytest.raises(TransferError, match="skipped"):
            await way.delivery.tokens(skipped, None)
        way.stream.end()
    assert written == ["H"]


async def test_an_embedding_has_the_number_of_its_choice_in_the_response(model_dir: Path) -> None:
    way, written = new_way(model_dir, first_choice=3), list[ChoiceDelta]()

    async def write(deltas: list[ChoiceDelta]) -> None:
        written.extend(deltas)

    async with asyncio.TaskGroup() as group:
        group.create_task(way.stream.write_to(write))
        way.delivery.embedding(b"1234")
        way.stream.end()
    assert [(each.choice_index, each.embedding) for each in written] == [(3, b"1234")]
