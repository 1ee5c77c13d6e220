"""The engine of a decode worker that also prefills, in deterministic mode, without services around it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from benchmarks.gpu.setting import DTYPE, Setting
from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.bench.inputs import BLOCK_SIZE
from kernels.decoder import DecoderKernel, LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.graph_shapes import GraphShapes
from pdserve.engine.graphs import CudaRecorder, DeviceDecoder, GraphConfig
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.model.batch import Batch


@dataclass(frozen=True, slots=True)
class Engine:
    """What a runner is made of, and the scheduler of its steps. All graphs are recorded."""

    scheduler: DecodeScheduler
    decoder: DeviceDecoder
    kv_cache: KvCache


def make_engine(
    setting: Setting, *, batch: int, length: int, max_prompt_tokens: int, itl_budget_s: float, graphs: GraphShapes
) -> Engine:
    """An engine with memory for `batch` sequences of `length` tokens."""
    shape, max_blocks = setting.shape, -(-length // BLOCK_SIZE)
    pool = BlockPool(batch * (max_blocks + 1), BLOCK_SIZE)
    config = DecodeSchedulerConfig(
        limits=SequenceLimits(max_model_len=length + 1, vocab_size=shape.vocab_size),
        max_num_seqs=batch,
        max_num_batched_tokens=max_prompt_tokens,
        itl_budget_s=itl_budget_s,
    )
    layout = KvLayout.uniform(
        model="random",
        dtype=str(DTYPE).removeprefix("torch."),
        block_size=BLOCK_SIZE,
        num_layers=len(shape.windows),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    recorded = None
    if setting.has_graphs:
        recorded = GraphConfig(recorder=CudaRecorder(), shapes=graphs, vocab_size=shape.vocab_size)
    decoder = DeviceDecoder(_Kernel(setting.decoder(deterministic=True)), setting.device, recorded)
    kv_cache = KvCache(layout, pool.num_blocks, setting.device)
    while decoder.record_next(kv_cache.tensor, is_idle=True):
        pass
    return Engine(DecodeScheduler(pool, config), decoder, kv_cache)


def make_job(setting: Setting, index: int, prompt_tokens: int, output_tokens: int) -> DecodeJob:
    """A request whose prompt is computed by the engine itself. Those of different indices share no prefix."""
    vocab_size = setting.shape.vocab_size
    return DecodeJob(
        request_id=RequestId(f"r{index:04}"),
        prompt_token_ids=[(index * 31 + position) % vocab_size for position in range(prompt_tokens)],
        params=SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
        hash_key=index.to_bytes(32, "big"),
        local_prefill_threshold=2**32 - 1,
    )


class _Kernel:
    """Adapter of a decoder's kernel to the engine's interface."""

    def __init__(self, kernel: DecoderKernel) -> None:
        self._kernel = kernel

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        return self._kernel.forward(batch.token_ids, batch.kv_rows(), batch.logits_rows, kv_cache)
