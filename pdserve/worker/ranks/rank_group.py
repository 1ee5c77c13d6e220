"""A worker with several ranks as rank 0 sees it, from start to end.

Rank 0 alone schedules, samples and communicates with other processes. The other ranks are its child processes
(`pdserve.worker.ranks.processes`), to which it sends every step (`pdserve.worker.ranks.rank0`).
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.ranks import ProcessGroup, TorchRanks
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
from pdserve.worker.ranks.startup import SetupState

#: Time for a worker to report why it ends, and to end, once a rank on a GPU is lost.
END_S = 30.0
#: Time for NCCL to end.
GROUP_END_S = 10.0

log = get_logger(__name__)


class RankGroup:
    """All ranks of one worker."""

    def __init__(self, config: WorkerConfig, device: torch.device) -> None:
        """Starts the other ranks. Raises `SetupError`, also when this number of ranks cannot split the model."""
        self._size = config.tensor_parallel_size
        rank_config(ModelConfig.from_dir(config.model_dir), self._size)
        self._config = config_of_rank(config, 0, num_cores=num_cores())
        self._device = device
        self._lost: PdserveError | None = None
        self._on_lost: Callable[[PdserveError], None] = lambda error: None
        self._group: ProcessGroup | None = None
        self._shard: ModelShard | None = None
        self._directory = _temporary_directory()
        self._rendezvous = Path(self._directory.name, "rendezvous")
        self._stage = make_stage(config.staging_memory)
        self._followers = RankProcesses(config, self._stage, self._rendezvous, self._lose)
        #: Makes the decoder, sampler and cache that steps use.
        self.rank0 = Rank0(self._followers)

    def load(self) -> ModelShard:
        """Loads rank 0's shard and returns it when all ranks have loaded theirs. Blocks. Raises `SetupError`."""
        self._followers.expect(SetupState.STARTED)
        try:
            group, device_bytes = form_group(self._rendezvous, 0, self._size, self._device)
            self._group = group
            shard = self._shard = load_shard(
                self._config,
                self._device,
                ranks=TorchRanks(group),
                agree=lambda budget: agree(group, self._device, budget),
                group_bytes=device_bytes,
            )
        except (PdserveError, RuntimeError) as error:
            # Often the cause is on another rank, and rank 0 only sees that rank disappear.
            if complaint := self._followers.complaint():
                raise SetupError(complaint) from error
            if isinstance(error, PdserveError):
                raise SetupError(f"Rank 0 ({self._device}): {error}") from error
            raise SetupError(f"The ranks cannot communicate: {error}.") from error
        self._followers.expect(SetupState.READY)
        return shard

    def block_memory(self, layout: KvLayout, own: KvCache, staging_bytes: int) -> StagedMemory:
        """Block memory with all heads, for the event loop. Raises `SetupError`."""
        size = stage_bytes(layout, staging_bytes)
        memory = map_stage(self._stage, size, self._device)
        stage = Stage(memory, layout, own.tensor.dtype, heads_of_rank(layout, 0, self._size))
        return StagedMemory(RankCopies(self.rank0, own, stage), memory.numpy(), layout.block_bytes)

    def watch(self, on_lost: Callable[[PdserveError], None]) -> None:
        """Sets the callback for a lost rank, without which the worker cannot go on. Any thread may call it."""
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def was_ended(self) -> bool:
        """Whether another rank was ended from outside. To be called once the step loop has failed; may take seconds."""
        return self._followers.were_ended()

    def close(self) -> None:
        """Ends the other ranks. The last step and the last copy must have ended."""
        self._followers.close()
        if self._shard is not None:
            self._shard.close()
        if self._device.type == "cuda" and self._group is not None and self._lost is None:
            # The group is not left to the end of the interpreter, which would wait for it without a limit.
            ending = threading.Thread(target=self._group.abort, name="end-of-ranks", daemon=True)
            ending.start()
            ending.join(GROUP_END_S)
            if ending.is_alive():
                log.warning("group_left_behind", reason="NCCL did not end")
        self._group = None
        os.close(self._stage)
        self._directory.cleanup()

    def _lose(self, error: PdserveError) -> None:
        self._lost = error
        self._on_lost(error)
        if self._device.type != "cuda":
            return  # Gloo notices that the connection has ended.
        # A thread that waits on the GPU for the lost rank would wait forever. Aborting the group may also take forever
        # while there are CUDA graphs, and a group that is still being formed cannot be aborted.
        timer = threading.Timer(END_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        if self._group is not None:
            self._group.abort()


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="pdserve-ranks-")
    except OSError as error:
        raise SetupError(
            f"Cannot create the temporary directory in which ranks find each other: {error}. Set TMPDIR to a writable "
            "directory; in a container with a read-only root, mount one at /tmp."
        ) from error
