"""Both schedulers with a real decoder: a request's tokens are those of a lone run however it is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.model.decoder import Decoder
from pdserve.model.loader import load_decoder
from prefill_svc.request import PrefillJob, PrefillSchedulerConfig
from prefill_svc.scheduler import PrefillScheduler
from tests.unit.engine.fakes import KEY, Worker
from tests.unit.model.tiny import save_model

BLOCK_SIZE = 4
ALWAYS = 2**32 - 1
BOUNDS = SequenceLimits(max_model_len=128, vocab_size=97, eos_token_ids=frozenset({2}))
PARAMS = SamplingParams(n=2, seed=3, temperature=0.8, top_p=0.9, max_tokens=12, ignore_eos=True)
PROMPTS = {RequestId(f"r{i}"): [(i * 7 + 3 * k) % 97 for k in range(5 + 4 * i)] for i in range(4)}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory: Path = save_model(tmp_path_factory.mktemp("tiny"))
    return load_decoder(directory)


def worker(decoder: Decoder, scheduler: DecodeScheduler | PrefillScheduler, pool: BlockPool) -> Worker:
    config = decoder.config
    kv_layout = KvLayout.uniform(
        model="tiny",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    return Worker(pool=pool, scheduler=scheduler, decoder=decoder, kv_layout=kv_layout)


def decode(decoder: Decoder, num_blocks: int, chunk: int) -> tuple[Worker, DecodeScheduler]:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    config = DecodeSchedulerConfig(limits=BOUNDS, max_num_batched_tokens=chunk)
    scheduler = DecodeScheduler(pool, config)
    return worker(decoder, scheduler, pool), scheduler


def job(request_id: RequestId, threshold: int) -> DecodeJob:
    return DecodeJob(
        request_id=request_id,
        prompt_token_ids=PROMPTS[request_id],
        params=PARAMS,
        hash_key=KEY,
        local_prefill_threshold=threshold,
    )


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> dict[RequestId, list[list[int]]]:
    """The tokens of each request, computed by itself with its prompt in one chunk."""
    tokens_of: dict[RequestId, list[list[int]]] = {}
    for request_id in PROMPTS:
        on_its_own, scheduler = decode(decoder, 64, chunk=1000)
        scheduler.reserve(job(request_id, ALWAYS))
        on_its_own.run()
        tokens_of[request_id] = [on_its_own.tokens(request_id, choice) for choice in range(PARAMS.n)]
        assert len(tokens_of[request_id][0]) == PARAMS.max_tokens
    return tokens_of


@pytest.mark.parametrize(("num_blocks", "chunk"), [(200, 1000), (200, 3), (12, 5)])
def test_chunking_and_preemption_change_no_token(
    decoder: Decoder, alone: dict[RequestId, list[list[int]]], num_blocks: int, chunk: int
) -> None:
    worker, scheduler = decode(decoder, num_blocks, chunk)
    for request_id in PROMPTS:
        scheduler.reserve(job(request_id, ALWAYS))
    worker.run()
    assert (scheduler.load().num_preemptions > 0) is (num_blocks == 12)
    for request_id, choices in alone.items():
        assert [worker.tokens(request_id, choice) for choice in range(PARAMS.n)] == choices


def test_disaggregated_equals_monolithic(decoder: Decoder, alone: dict[RequestId, list[list[int]]]) -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    prefills = PrefillScheduler(pool, PrefillSchedulerConfig(limits=BOUNDS, max_num_batched_tokens=6))
    source = worker(decoder, prefills, pool)
    target, decodes = decode(decoder, 64, chunk=6)
    for request_id, prompt in PROMPTS.items():
        prefills.add(PrefillJob(request_id=request_id, prompt_token_ids=prompt, params=PARAMS, hash_key=KEY))
        decodes.reserve(job(request_id, 0))
    source.run()
    target.run()
    for grant in (grant for events in target.seen for grant in events.grants):
        sent = prefills.block_tables(grant.request_id)[0]
        for here, there in zip(grant.block_tables[0], sent, strict=True):
            target.cache.block_bytes_view(here)[:] = source.cache.block_bytes_view(there)
        first_tokens = [source.tokens(grant.request_id, choice)[0] for choice in range(PARAMS.n)]
        prefills.release(grant.request_id)
        decodes.activate(grant.request_id, first_tokens)
    target.run()
    for request_id, choices in alone.items():
        for choice, tokens in enumerate(choices):
            assert source.tokens(request_id, choice) + target.tokens(request_id, choice) == tokens
    assert source.pool.num_free == target.pool.num_free == 64
