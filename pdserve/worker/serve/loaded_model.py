"""From a model directory to something that computes: decoder, KV cache and pool, sized and checked."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.choice import KernelChoice
from kernels.cpu.decoder import Borrowing
from pdserve.base.layout import KvLayout
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device_runner import DeviceRunner
from pdserve.engine.graphs import DeviceDecoder
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import SequenceLimits
from pdserve.model.batch import Batch
from pdserve.model.decoder import Decoder
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.core_leases import CoreLeases
from pdserve.worker.load.cores import open_core_leases, require_cpus
from pdserve.worker.load.device import open_device, require_handover_memory
from pdserve.worker.load.model_shard import ModelShard, load_shard, open_sampler
from pdserve.worker.ranks.rank_group import RankGroup

if TYPE_CHECKING:
    from pdserve.engine.device_sampler import DeviceSampler

#: Rows of the warm-up step: enough to take the paths that a prompt takes.
_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the step loop computes with, and what it may be asked."""

    layout: KvLayout
    limits: SequenceLimits
    decoder: Decoder
    kernels: KernelChoice
    #: Of several ranks, rank 0's heads.
    kv_cache: KvCache
    pool: BlockPool
    runner: Runner
    #: Where this worker says whether its cores are idle; None: they are not lent.
    core_leases: CoreLeases | None
    #: The other ranks; None: there are none.
    team: RankGroup | None

    def close(self) -> None:
        """Ends the other ranks. No step is computed any more, and no block copied."""
        if self.team is not None:
            self.team.close()


def load_model(config: WorkerConfig) -> LoadedModel:
    """Reads the weights, allocates the KV cache. Blocks for some seconds. Raises `SetupError` with the numbers.

    With several ranks it starts the other processes, too; who calls it closes what it returns.
    """
    require_handover_memory(config)
    device = open_device(config.device, config.tensor_parallel_size)
    require_cpus(config)
    if config.tensor_parallel_size > 1:
        return _load_with_team(config, device)
    leases = open_core_leases(config) if device.type == "cpu" else None
    part = load_shard(config, device, borrowing=_borrowing(config, leases))
    return _loaded(part, _runner(part, open_sampler(device)), leases=leases)


def _load_with_team(config: WorkerConfig, device: torch.device) -> LoadedModel:
    with ExitStack() as stack:
        team = RankGroup(config, device)
        stack.callback(team.close)
        part = team.load()
        runner = Runner(
            team.lead.decoder(part.step_decoder),
            team.lead.cache(part.kv_cache),
            team.lead.sampler(open_sampler(device)),
        )
        loaded = _loaded(part, runner, team=team)
        stack.pop_all()
        return loaded


def _loaded(
    part: ModelShard, runner: Runner, *, leases: CoreLeases | None = None, team: RankGroup | None = None
) -> LoadedModel:
    return LoadedModel(
        layout=part.layout,
        limits=SequenceLimits(
            max_model_len=part.decoder.max_model_len,
            vocab_size=part.config.vocab_size,
            eos_token_ids=frozenset(part.config.eos_token_ids),
        ),
        decoder=part.decoder,
        kernels=part.decoder.kernels,
        kv_cache=part.kv_cache,
        pool=BlockPool(part.kv_cache.num_blocks, part.layout.block_size),
        runner=runner,
        core_leases=leases,
        team=team,
    )


def _runner(part: ModelShard, sampler: Sampler | DeviceSampler) -> Runner:
    if isinstance(part.step_decoder, DeviceDecoder) and not isinstance(sampler, Sampler):
        return DeviceRunner(part.step_decoder, part.kv_cache, sampler)
    return Runner(part.step_decoder, part.kv_cache, sampler)


def _borrowing(config: WorkerConfig, leases: CoreLeases | None) -> Borrowing | None:
    if leases is None or not config.borrow_cpus:
        return None
    return Borrowing(leases=leases.memory, borrower=leases.borrower, cpus=config.borrow_cpus)


def warm_up(loaded: LoadedModel) -> None:
    """One prompt chunk and one decode row, so that no request pays for mapping the weights in, compiling, lazy set-up.

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
        loaded.runner.try_out(batch)
