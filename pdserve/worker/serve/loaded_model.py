"""From a model directory to a model that is ready to compute: decoder, KV cache and block pool, sized and checked."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.choice import KernelChoice
from kernels.cpu.decoder import Borrowing
from pdserve.base.layout import KvLayout
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.cpu_sampler import CpuSampler
from pdserve.engine.device_runner import DeviceRunner
from pdserve.engine.graphs import DeviceDecoder
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.model.decoder import Decoder
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.core_leases import CoreLeases
from pdserve.worker.load.cores import open_core_leases, require_cpus
from pdserve.worker.load.device import open_device, require_handover_memory
from pdserve.worker.load.memory_profile import CudaMemory
from pdserve.worker.load.model_shard import ModelShard, load_shard
from pdserve.worker.load.samplers import open_sampler
from pdserve.worker.ranks.rank_group import RankGroup

if TYPE_CHECKING:
    from pdserve.engine.device_sampler import DeviceSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything the step loop computes with, and the limits of what may be requested."""

    layout: KvLayout
    limits: SequenceLimits
    decoder: Decoder
    kernels: KernelChoice
    #: Heads of this rank alone, if there are several ranks.
    kv_cache: KvCache
    pool: BlockPool
    runner: Runner
    #: The file in which this worker reports whether its cores are idle; None: they are not lent.
    core_leases: CoreLeases | None
    #: This rank together with the others; None: there are no others.
    rank_group: RankGroup | None

    def close(self) -> None:
        """Ends the other ranks. The last step and the last copy of blocks must have ended."""
        if self.rank_group is not None:
            self.rank_group.close()


def load_model(config: WorkerConfig) -> LoadedModel:
    """Reads the weights, allocates the KV cache. Blocks for some seconds. Raises `SetupError` with the numbers.

    With several ranks it also starts the other processes. The caller closes the result.
    """
    require_handover_memory(config)
    device = open_device(config.device, config.tensor_parallel_size)
    require_cpus(config)
    if config.tensor_parallel_size > 1:
        return _load_with_ranks(config, device)
    leases = open_core_leases(config) if device.type == "cpu" else None
    shard = load_shard(config, device, borrowing=_borrowing(config, leases))
    return _loaded(shard, _runner(shard, open_sampler(shard.decoder)), leases=leases)


def _load_with_ranks(config: WorkerConfig, device: torch.device) -> LoadedModel:
    with ExitStack() as stack:
        group = RankGroup(config, device)
        stack.callback(group.close)
        shard = group.load()
        runner = Runner(
            group.rank0.decoder(shard.step_decoder),
            group.rank0.cache(shard.kv_cache),
            group.rank0.sampler(open_sampler(shard.decoder)),
            record_next=(
                group.rank0.record_next(shard.record_next, CudaMemory(device).free) if device.type == "cuda" else None
            ),
        )
        loaded = _loaded(shard, runner, rank_group=group)
        stack.pop_all()
        return loaded


def _loaded(
    shard: ModelShard, runner: Runner, *, leases: CoreLeases | None = None, rank_group: RankGroup | None = None
) -> LoadedModel:
    return LoadedModel(
        layout=shard.layout,
        limits=SequenceLimits(
            max_model_len=shard.decoder.max_model_len,
            vocab_size=shard.config.vocab_size,
            eos_token_ids=frozenset(shard.config.eos_token_ids),
        ),
        decoder=shard.decoder,
        kernels=shard.decoder.kernels,
        kv_cache=shard.kv_cache,
        pool=BlockPool(shard.kv_cache.num_blocks, shard.layout.block_size, shard.layout.windows),
        runner=runner,
        core_leases=leases,
        rank_group=rank_group,
    )


def _runner(shard: ModelShard, sampler: Sampler | CpuSampler | DeviceSampler) -> Runner:
    if isinstance(shard.step_decoder, DeviceDecoder) and not isinstance(sampler, Sampler | CpuSampler):
        return DeviceRunner(shard.step_decoder, shard.kv_cache, sampler, record_next=shard.record_next)
    return Runner(shard.step_decoder, shard.kv_cache, sampler, interrupt=shard.decoder.interrupt)


def _borrowing(config: WorkerConfig, leases: CoreLeases | None) -> Borrowing | None:
    if leases is None or not config.borrow_cpus:
        return None
    return Borrowing(leases=leases.memory, borrower=leases.borrower, cpus=config.borrow_cpus)
