"""From a model directory to something that computes: decoder, KV cache and pool, sized and checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.choice import KernelChoice, KernelOptions
from kernels.cpu.decoder import Borrowing
from pdserve.base.core_leases import CoreLeases
from pdserve.base.layout import KvLayout
from pdserve.base.worker_config import WorkerConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import SequenceLimits
from pdserve.model.batch import Batch
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.loader import load_decoder
from pdserve.worker.cores import open_core_leases, require_cpus
from pdserve.worker.memory import plan_kv

#: Rows of the warm-up step: enough to take the paths that a prompt takes.
_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the step loop computes with, and what it may be asked."""

    layout: KvLayout
    limits: SequenceLimits
    decoder: Decoder
    kernels: KernelChoice
    kv_cache: KvCache
    pool: BlockPool
    runner: Runner
    #: Where this worker says whether its cores are idle; None: they are not lent.
    core_leases: CoreLeases | None


def load_model(config: WorkerConfig) -> LoadedModel:
    """Maps the weights, allocates the KV cache. Blocks for some seconds. Raises `SetupError` with the numbers."""
    require_cpus(config)
    leases = open_core_leases(config)
    model = ModelConfig.from_dir(config.model_dir)

    # Rounded weights make another model: its blocks must not be mixed with those of the original.
    name = "/".join(filter(None, (fingerprint(config.model_dir), config.quantization)))

    def layout_for(max_model_len: int | None) -> KvLayout:
        return model.kv_layout(
            fingerprint=name,
            dtype=config.dtype,
            block_size=config.block_size,
            max_model_len=max_model_len,
        )

    budget = plan_kv(
        layout_for(config.max_model_len),
        kv_cache_memory=config.kv_cache_memory,
        wanted_model_len=config.max_model_len,
        model_limit=model.max_position_embeddings,
    )
    # Some models rotate by the length that is served: the layout names the one decided above.
    layout = layout_for(budget.max_model_len)
    decoder = load_decoder(
        config.model_dir,
        dtype=config.dtype,
        max_model_len=budget.max_model_len,
        kernels=KernelOptions(
            implementation=config.kernels,
            instruction_set=config.instruction_set,
            num_threads=config.threads,
            cpus=config.cpus,
            borrowing=_borrowing(config, leases),
            quantization=config.quantization,
        ),
    )
    kv_cache = KvCache(layout, budget.num_blocks, torch.device("cpu"))
    return LoadedModel(
        layout=layout,
        limits=SequenceLimits(
            max_model_len=budget.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=frozenset(model.eos_token_ids),
        ),
        decoder=decoder,
        kernels=decoder.kernels,
        kv_cache=kv_cache,
        pool=BlockPool(budget.num_blocks, layout.block_size),
        runner=Runner(decoder, kv_cache, Sampler()),
        core_leases=leases,
    )


def _borrowing(config: WorkerConfig, leases: CoreLeases | None) -> Borrowing | None:
    if leases is None or not config.borrow_cpus:
        return None
    return Borrowing(leases=leases.memory, borrower=leases.borrower, cpus=config.borrow_cpus)


def warm_up(loaded: LoadedModel) -> None:
    """One prompt chunk and one decode row, so that no request pays for mapping the weights in and for lazy set-up.

    Runs on the step thread before anything else; block 0 is free then, and what it holds does not matter.
    """
    for first, num_tokens in ((0, min(_WARM_UP_TOKENS, loaded.layout.block_size)), (0, 1)):
        rows = torch.arange(first, first + num_tokens)
        batch = Batch(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64),
            positions=rows,
            slot_mapping=rows,
            query_starts=torch.tensor([0, num_tokens]),
            context_lens=torch.tensor([num_tokens]),
            block_tables=torch.zeros((1, 1), dtype=torch.int64),
            logits_rows=torch.tensor([num_tokens - 1]),
        )
        loaded.decoder.forward(batch, loaded.kv_cache.tensor)
