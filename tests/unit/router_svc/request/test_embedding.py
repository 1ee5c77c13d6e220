"""What a router takes of a worker's embedding, and how both encode it."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.base.errors import RequestError, TransferError
from pdserve.base.ids import RequestId
from pdserve.base.pooling import Pooling, PoolingKind
from pdserve.base.sampling import SamplingParams
from pdserve.base.vectors import floats
from pdserve.base.wire import pooling_from_wire, pooling_to_wire
from pdserve.v1 import prefill_pb2
from router_svc.generation import Generation, TextRules
from router_svc.request.embedding import Embedding

GENERATION = Generation(
    request_id=RequestId("a"),
    worker_request_id=RequestId("a"),
    prompt=(1, 2),
    sampling=SamplingParams(max_tokens=0),
    text=TextRules(),
    endpoint="/v1/embeddings",
)


def embedding(dimensions: int) -> Embedding:
    generation = SimpleNamespace(prompt=[1, 2], pooling=Pooling(dimensions=dimensions))
    prompt: Any = SimpleNamespace(generation=generation)

    async def heartbeat(waits: int) -> None:
        raise AssertionError("it waits for no worker")

    return Embedding(prompt, heartbeat)


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def test_the_bytes_of_an_embedding_are_little_endian() -> None:
    embedding(3)._require_plausible(packed(1.5, -2.0, 0.0))
    assert floats(bytes.fromhex("0000c03f 000000c0")).tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("kind", "is_read"), [(PoolingKind.LAST, True), (PoolingKind.CLS, False)])
async def test_what_is_cached_matters_only_where_it_spares_work(
    monkeypatch: pytest.MonkeyPatch, kind: PoolingKind, is_read: bool
) -> None:
    pooling = Embedding(*_waiting_for(kind, read := []))

    async def result(_: object) -> bytes:
        return packed(1.0)

    monkeypatch.setattr(Embedding, "_result", result)
    await pooling.run()
    assert read == (["hashes"] if is_read else [])


def _waiting_for(kind: PoolingKind, read: list[str]) -> Any:
    generation = replace(GENERATION, pooling=Pooling(kind=kind, dimensions=1))

    async def look_up() -> None:
        read.append("hashes")

    def delivered(values: bytes) -> None:
        assert values == packed(1.0)

    return (
        SimpleNamespace(
            generation=generation,
            placer=SimpleNamespace(look_up=look_up),
            journal=SimpleNamespace(append=lambda event: None),
            delivery=SimpleNamespace(embedding=delivered),
        ),
        None,
    )


def test_a_prompt_is_computed_in_whole_where_each_token_matters() -> None:
    for kind in PoolingKind:
        pooled = replace(GENERATION, pooling=Pooling(kind=kind))
        assert pooled.needs_whole_prompt == (kind is not PoolingKind.LAST)
    assert replace(GENERATION, prompt_logprobs=0).needs_whole_prompt
    assert not GENERATION.needs_whole_prompt


@pytest.mark.parametrize(
    "values",
    [packed(1.0), packed(1.0, 2.0, 3.0), packed(1.0, 2.0)[:-1], packed(1.0, float("nan")), packed(1.0, float("inf"))],
    ids=["short", "long", "odd", "nan", "inf"],
)
def test_what_no_worker_sends_is_an_error_of_the_transfer(values: bytes) -> None:
    with pytest.raises(TransferError, match="embedding"):
        embedding(2)._require_plausible(values)


@pytest.mark.parametrize("kind", PoolingKind)
def test_workers_read_what_routers_send(kind: PoolingKind) -> None:
    for pooling in (Pooling(kind=kind, dimensions=7, normalizes=False), Pooling(kind=kind)):
        assert (
            pooling_from_wire(prefill_pb2.Pooling.FromString(pooling_to_wire(pooling).SerializeToString())) == pooling
        )


def test_a_kind_that_a_worker_does_not_know_is_refused() -> None:
    with pytest.raises(RequestError, match="unknown"):
        pooling_from_wire(prefill_pb2.Pooling())
