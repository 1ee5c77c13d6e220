"""From a model directory to one rank's shard: its part of the decoder, and KV blocks with its heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu.decoder import Borrowing
from kernels.decoder import ALONE, Ranks
from kernels.split import even_slice
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.base.timing import timed
from pdserve.engine.graph_shapes import plan_graphs
from pdserve.engine.graphs import CudaRecorder, DeviceDecoder, GraphConfig
from pdserve.engine.kv_cache import KvCache
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.loader import load_decoder, memory_of_weights
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.gpu_load import load_on_gpu
from pdserve.worker.load.kv_budget import KvBudget, plan_kv
from pdserve.worker.load.load_plan import Agree, LoadPlan, make_plan

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """One rank's share of a model; the whole model if there is one rank."""

    #: Layout of blocks with all heads, which is how they are handed over.
    layout: KvLayout
    config: ModelConfig
    decoder: Decoder
    #: The decoder as steps call it.
    step_decoder: Decoder | DeviceDecoder
    #: Blocks with this rank's heads.
    kv_cache: KvCache

    def record_next(self, is_idle: bool) -> bool:
        """Records one more graph, as `pdserve.engine.runner.RecordNext`."""
        decoder = self.step_decoder
        return isinstance(decoder, DeviceDecoder) and decoder.record_next(self.kv_cache.tensor, is_idle=is_idle)

    def close(self) -> None:
        """Frees the CUDA graphs, without which the ranks' group cannot end. The last step must have ended."""
        if isinstance(self.step_decoder, DeviceDecoder):
            self.step_decoder.drop_graphs()


def load_shard(
    config: WorkerConfig,
    device: torch.device,
    *,
    ranks: Ranks = ALONE,
    agree: Agree = lambda budget: budget,
    group_bytes: int = 0,
    borrowing: Borrowing | None = None,
) -> ModelShard:
    """Reads weights, allocates the KV cache. Blocks for some seconds. Raises `SetupError` with the numbers.

    All ranks call it with the same config, except for cores and device. `group_bytes`: GPU memory that communication
    between ranks has taken.
    """
    with timed(log, "model_identified"):
        plan = make_plan(config, device, ranks, agree, borrowing)
    decoder, budget = _load_on_cpu(plan) if device.type == "cpu" else load_on_gpu(plan, group_bytes)
    layout = plan.rank_layout(budget.max_model_len)
    with timed(log, "kv_cache_allocated", bytes=budget.num_blocks * layout.block_bytes):
        kv_cache = KvCache(layout, budget.num_blocks, device, is_shared=config.uses_local_sockets)
    return ModelShard(
        layout=plan.layout(budget.max_model_len),
        config=plan.model,
        decoder=decoder,
        step_decoder=_step_decoder(plan, decoder),
        kv_cache=kv_cache,
    )


def _load_on_cpu(plan: LoadPlan) -> tuple[Decoder, KvBudget]:
    config, model = plan.config, plan.model
    weight_bytes = memory_of_weights(model, dtype=config.dtype, kernels=plan.options, ranks=plan.ranks)
    # Ranks on CPUs share one memory, so blocks with all heads have to fit.
    budget = plan.agree(plan_kv(plan.layout(config.max_model_len), plan.kv_request, weight_bytes=weight_bytes))
    with timed(log, "weights_loaded"):
        decoder = load_decoder(
            config.model_dir,
            dtype=config.dtype,
            max_model_len=budget.max_model_len,
            kernels=plan.options,
            device=str(plan.device),
            ranks=plan.ranks,
        )
    return decoder, budget


def _step_decoder(plan: LoadPlan, decoder: Decoder) -> Decoder | DeviceDecoder:
    if plan.device.type == "cpu":
        return decoder
    if not plan.replays(decoder):
        return DeviceDecoder(decoder, plan.device)
    vocab, ranks = decoder.config.vocab_size, plan.ranks
    graphs = GraphConfig(
        recorder=CudaRecorder(),
        shapes=plan_graphs(
            max(1, plan.config.max_decoding),
            -(-decoder.max_model_len // plan.config.block_size),
            # Windows bound the splits of the fast mode, whose size follows from the width.
            any_width=not plan.config.deterministic and not any(plan.model.layer_windows),
        ),
        # Only rank 0 receives the other ranks' columns.
        vocab_size=vocab if ranks.rank == 0 else len(range(vocab)[even_slice(vocab, ranks.rank, ranks.size)]),
    )
    return DeviceDecoder(decoder, plan.device, graphs)
