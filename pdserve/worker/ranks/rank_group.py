"""Rank 0's side of a worker with several ranks, from its start to its end.

Rank 0 alone schedules, samples and speaks to other processes. The others are its child processes
(`pdserve.worker.ranks.processes`), which it has do what it does (`pdserve.worker.ranks.rank0`).
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.ranks import Group, TorchRanks
from kvtransfer.handover.staging import StagedMemory
from pdserve.base.errors import PdserveError, SetupError
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.engine.kv_cache import KvCache
from pdserve.model.config import ModelConfig
from pdserve.model.sharding import rank_config
from pdserve.worker.config import WorkerConfig
from pdserve.worker.kv_bytes.stage import Stage, stage_bytes
from pdserve.worker.load.cores import num_cores
from pdserve.worker.load.model_shard import ModelShard, load_shard
from pdserve.worker.ranks.process_group import agree, form_group
from pdserve.worker.ranks.processes import RankProcesses
from pdserve.worker.ranks.rank0 import Rank0, RankCopies
from pdserve.worker.ranks.shared_stage import heads_of_rank, make_stage, map_stage
from pdserve.worker.ranks.split import config_of_rank

#: For a worker to say why it ends, once a rank on a GPU is lost, and to end.
_END_S = 30.0
_GROUP_END_S = 10.0

log = get_logger(__name__)


class RankGroup:
    """All ranks of one worker, seen by the first."""

    def __init__(self, config: WorkerConfig, device: torch.device) -> None:
        """Starts the others. Raises `SetupError`, for a model that so many ranks cannot split, too."""
        self._size = config.tensor_parallel_size
        rank_config(ModelConfig.from_dir(config.model_dir), self._size)
        self._config = config_of_rank(config, 0, num_cores=num_cores())
        self._device = device
        self._lost: PdserveError | None = None
        self._on_lost: Callable[[PdserveError], None] = lambda error: None
        self._group: Group | None = None
        self._part: ModelShard | None = None
        self._directory = _temporary_directory()
        self._rendezvous = Path(self._directory.name, "rendezvous")
        self._stage = make_stage(config.staging_memory)
        self._others = RankProcesses(config, self._stage, self._rendezvous, self._lose)
        #: What steps are computed with.
        self.lead = Rank0(self._others)

    def load(self) -> ModelShard:
        """Rank 0's part, when all have loaded theirs. Blocks. Raises `SetupError`."""
        self._others.expect("here")
        try:
            group, device_bytes = form_group(self._rendezvous, 0, self._size, self._device)
            self._group = group
            part = self._part = load_shard(
                self._config,
                self._device,
                ranks=TorchRanks(group),
                agree=lambda budget: agree(group, self._device, budget),
                group_bytes=device_bytes,
            )
        except (PdserveError, RuntimeError) as error:
            # What rank 0 sees is often that another is gone.
            if complaint := self._others.complaint():
                raise SetupError(complaint) from error
            if isinstance(error, PdserveError):
                raise SetupError(f"Rank 0 ({self._device}): {error}") from error
            raise SetupError(f"The ranks do not work together: {error}.") from error
        self._others.expect("ready")
        return part

    def block_memory(self, layout: KvLayout, own: KvCache, staging_bytes: int) -> StagedMemory:
        """Blocks of all heads, for the event loop. Raises `SetupError`."""
        size = stage_bytes(layout, staging_bytes)
        stage = map_stage(self._stage, size, self._device)
        part = Stage(stage, layout, own.tensor.dtype, heads_of_rank(layout, 0, self._size))
        return StagedMemory(RankCopies(self.lead, own, part), stage.numpy(), layout.block_bytes)

    def watch(self, on_lost: Callable[[PdserveError], None]) -> None:
        """Calls it, on any thread, when a rank is lost: the worker cannot go on."""
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def close(self) -> None:
        """Ends the other ranks. No step is computed any more, and nothing copied."""
        self._others.close()
        if self._part is not None:
            self._part.close()
        if self._device.type == "cuda" and self._group is not None and self._lost is None:
            # Here, and not when the interpreter ends, where nobody could stop to wait for it.
            ending = threading.Thread(target=self._group.abort, name="end-of-ranks", daemon=True)
            ending.start()
            ending.join(_GROUP_END_S)
            if ending.is_alive():
                log.warning("group_left_behind", reason="NCCL does not end")
        self._group = None
        os.close(self._stage)
        self._directory.cleanup()

    def _lose(self, error: PdserveError) -> None:
        self._lost = error
        self._on_lost(error)
        if self._device.type != "cuda":
            return  # Gloo sees that a connection has ended.
        # Whoever waits on the GPU for the lost rank would wait for ever. To abort may take as long, while there are
        # graphs; and no group can be aborted that is still being formed.
        given_up = threading.Timer(_END_S, os._exit, (1,))
        given_up.daemon = True
        given_up.start()
        if self._group is not None:
            self._group.abort()


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="pdserve-ranks-")
    except OSError as error:
        raise SetupError(
            f"Ranks find each other at a file in a temporary directory, which cannot be made: {error}. Name a "
            "directory that can be written with TMPDIR; in a container with a read-only root, mount one at /tmp."
        ) from error
