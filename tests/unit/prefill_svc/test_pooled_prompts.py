"""Prompts that are pooled: which hidden states make an embedding, in which steps, and what the cache is good for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.pooling import Pooling, PoolingKind
from pdserve.model.batch import Batch
from prefill_svc.request import PrefillJob
from tests.unit.engine.fakes import FakeDecoder, fake_logits
from tests.unit.prefill_svc.prefill_worker import PROMPT, A, B, C, PrefillWorker, first_token, job, prefill


class HiddenDecoder(FakeDecoder):
    """What it has as logits are hidden states where these are requested; others are not to be taken for them."""

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        logits = super().forward(batch, kv_cache, on_layer)
        return -logits if batch.hidden_only else logits


def pooled(request_id: RequestId, prompt: list[int], kind: PoolingKind) -> PrefillJob:
    return replace(job(request_id, prompt), pooling=Pooling(kind=kind, normalizes=False))


def embedding_of(worker: PrefillWorker, request_id: RequestId) -> bytes:
    [values] = [each.values for events in worker.seen for each in events.embeddings if each.request_id == request_id]
    return values


def expected(prompt: list[int], kind: PoolingKind) -> bytes:
    states = [-fake_logits(prompt[: index + 1]).numpy().astype(np.float64) for index in range(len(prompt))]
    kept = {PoolingKind.LAST: states[-1:], PoolingKind.CLS: states[:1], PoolingKind.MEAN: states}[kind]
    total = kept[0]
    for state in kept[1:]:
        total = total + state
    values: bytes = (total / len(kept)).astype("<f4").tobytes()
    return values


@pytest.mark.parametrize("kind", PoolingKind)
@pytest.mark.parametrize("budget", [1, 3, 4, 100])
def test_embeddings_are_of_their_rows_and_do_not_depend_on_chunks_or_on_others(kind: PoolingKind, budget: int) -> None:
    worker = prefill(budget=budget, decoder=HiddenDecoder())
    other = [9, *PROMPT[1:], 12, 13]
    for request in (job(C, [3, 4, 5]), pooled(A, PROMPT, kind), job(B, other)):
        worker.scheduler.add(request)
    worker.run()
    assert embedding_of(worker, A) == expected(PROMPT, kind)
    assert A not in worker.reported
    assert (worker.tokens(B), worker.tokens(C)) == ([first_token(other)], [first_token([3, 4, 5])])
    for plan in worker.plans:
        assert len({chunk.pool is None for chunk in plan.chunks}) == 1
        assert plan.num_prefill_tokens <= budget


def test_pooled_prompts_share_a_step() -> None:
    worker = prefill(decoder=HiddenDecoder())
    kinds = {A: PoolingKind.MEAN, B: PoolingKind.LAST, C: PoolingKind.CLS}
    for request_id, kind in kinds.items():
        worker.scheduler.add(pooled(request_id, [*PROMPT, int(ord(request_id[0]) % 7)], kind))
    worker.run()
    assert len(worker.plans[0].chunks) == 3
    for request_id, kind in kinds.items():
        assert embedding_of(worker, request_id) == expected([*PROMPT, int(ord(request_id[0]) % 7)], kind)


@pytest.mark.parametrize(("kind", "num_cached"), [(PoolingKind.LAST, 8), (PoolingKind.CLS, 0), (PoolingKind.MEAN, 0)])
def test_cached_blocks_are_used_where_their_hidden_states_are_not_needed(kind: PoolingKind, num_cached: int) -> None:
    worker = prefill(decoder=HiddenDecoder())
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.add(pooled(B, PROMPT, kind))
    worker.run()
    assert worker.scheduler.num_cached(B) == num_cached
    assert embedding_of(worker, B) == expected(PROMPT, kind)
    # The blocks of a pooled prompt are of use to others.
    other = prefill(decoder=HiddenDecoder())
    other.scheduler.add(pooled(A, PROMPT, kind))
    other.run()
    other.scheduler.release(A)
    other.scheduler.add(job(C, PROMPT))
    other.run()
    assert other.scheduler.num_cached(C) == 8
    assert other.tokens(C) == [first_token(PROMPT)]


class BrokenDecoder(HiddenDecoder):
    """The hidden states of one token are no numbers."""

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        states = super().forward(batch, kv_cache, on_layer)
        for index, row in enumerate(batch.logits_rows.tolist()):
            if batch.token_ids[row] == PROMPT[5]:
                states[index] = torch.nan
        return states


def test_a_prompt_whose_hidden_states_are_no_numbers_fails_alone() -> None:
    worker = prefill(decoder=BrokenDecoder())
    worker.scheduler.add(pooled(A, PROMPT, PoolingKind.MEAN))
    worker.scheduler.add(pooled(B, [20, 21, 22], PoolingKind.MEAN))
    worker.run()
    assert [each.request_id for events in worker.seen for each in events.failures] == [A]
    assert [each.request_id for events in worker.seen for each in events.embeddings] == [B]
    worker.scheduler.release(B)
    assert worker.pool.num_free == worker.pool.num_blocks


def test_an_interrupted_step_adds_nothing() -> None:
    worker = prefill(budget=4, decoder=HiddenDecoder())
    worker.scheduler.add(pooled(A, PROMPT, PoolingKind.MEAN))
    worker.step()
    worker.interrupted_step()
    worker.run()
    assert embedding_of(worker, A) == expected(PROMPT, PoolingKind.MEAN)
