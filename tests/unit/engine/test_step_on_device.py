"""Steps that are replayed and sampled on a device give the same tokens as the host for the same requests."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices import DEVICE, HAS_GPU

pytest.importorskip("triton")

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.choice import Backend, KernelOptions
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device_sampler import DeviceSampler
from pdserve.engine.graph_shapes import plan_graphs
from pdserve.engine.graphs import Compute, CudaRecorder, DeviceDecoder, GraphConfig, Recorder
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import Runner, StepDecoder, TokenSampler
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.model.decoder import Decoder
from tests.property.model.tiny_models import Fields, make_decoder
from tests.unit.engine.fakes import KEY, Worker

BLOCK_SIZE, NUM_BLOCKS = 16, 40
ALWAYS = 2**32 - 1
BOUNDS = SequenceLimits(max_model_len=128, vocab_size=97, eos_token_ids=frozenset({2}))
FIELDS: Fields = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(n=2, seed=3, temperature=0.8, top_p=0.9, logprobs=2, max_tokens=4, ignore_eos=True),
    SamplingParams(seed=5, temperature=1.2, top_k=20, repetition_penalty=1.3, max_tokens=5, ignore_eos=True),
]
PROMPTS = [[(index * 7 + 3 * position) % 97 for position in range(5 + 7 * index)] for index in range(3)]


class Again:
    """Repeats the computation on the same memory, as a CUDA graph does."""

    def record(self, compute: Compute) -> Compute:
        return compute


def recorder() -> Recorder:
    return CudaRecorder() if HAS_GPU else Again()


def recording(model: Decoder) -> tuple[DeviceDecoder, KvCache]:
    """A decoder that has recorded all graphs, for steps on the cache."""
    cache = KvCache(layout_of(model), NUM_BLOCKS, DEVICE)
    graphs = GraphConfig(recorder=recorder(), shapes=plan_graphs(8, 8, any_width=False), vocab_size=97)
    decoder = DeviceDecoder(model, DEVICE, graphs)
    with torch.inference_mode():
        while decoder.record_next(cache.tensor, is_idle=True):
            pass
    return decoder, cache


def layout_of(model: Decoder) -> KvLayout:
    config = model.config
    return KvLayout.uniform(
        model="tiny",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def tokens_of(
    decoder: StepDecoder, sampler: TokenSampler, model: Decoder, *, cache: KvCache | None = None, together: bool
) -> dict[tuple[int, int], list[int]]:
    """The tokens of every choice of every request, computed in one batch in chunks of 10, or each request alone.

    `cache` None: in a new one on the CPU.
    """
    tokens = {}
    for batch in [range(3)] if together else [range(index, index + 1) for index in range(3)]:
        pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        scheduler = DecodeScheduler(
            pool, DecodeSchedulerConfig(limits=BOUNDS, max_num_batched_tokens=10 if together else 99)
        )
        worker = Worker(pool=pool, scheduler=scheduler, decoder=decoder, kv_layout=layout_of(model), sampler=sampler)
        if cache is not None:
            worker.cache, worker.runner = cache, Runner(decoder, cache, sampler)
        for index in batch:
            scheduler.reserve(
                DecodeJob(
                    request_id=RequestId(f"r{index}"),
                    prompt_token_ids=PROMPTS[index],
                    params=PARAMS[index],
                    hash_key=KEY,
                    local_prefill_threshold=ALWAYS,
                )
            )
        worker.run()
        for index in batch:
            for choice in range(PARAMS[index].n):
                tokens[index, choice] = worker.tokens(RequestId(f"r{index}"), choice)
    return tokens


def test_a_batch_on_the_device_gives_the_tokens_of_each_request_alone_on_the_host() -> None:
    reference = make_decoder(FIELDS, KernelOptions(backend=Backend.REFERENCE), torch.float32)
    expected = tokens_of(reference, Sampler(), reference, together=False)
    model = make_decoder(FIELDS, KernelOptions(backend=Backend.TRITON), torch.float32, device=DEVICE)
    replaying, cache = recording(model)
    assert tokens_of(replaying, DeviceSampler(DEVICE), model, cache=cache, together=True) == expected
    assert [len(tokens) for tokens in expected.values()] == [5, 4, 4, 5]
