"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.config import option
from pdserve.base.errors import SetupError
from pdserve.worker.config import CPU_STEP, GPU_LAYER_GROUPS, GPU_STEP, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """The settings that only decode workers have, and those of all workers."""

    stream_port: int = option(0, help="port that routers send requests to; 0 takes a free one", minimum=0)
    max_num_seqs: int | None = option(
        None,
        help=f"sequences decoded in one step; default: {CPU_STEP.sequences}, on a GPU {GPU_STEP.sequences}",
        minimum=1,
    )
    itl_budget_ms: float = option(
        50.0,
        help="milliseconds that a step may take which computes prompt tokens, or requests of batches, along with "
        "running sequences",
        minimum=1.0,
    )
    lease_s: float = option(20.0, help="seconds without progress after which a transfer is given up", minimum=0.1)
    layer_groups: int | None = option(
        None,
        help="messages per KV block; each carries a group of layers and is sent while later layers are computed; at "
        f"most one per layer; without a value, {GPU_LAYER_GROUPS} on a GPU and 1 on a CPU",
        minimum=1,
    )
    replication_interval_ms: float = option(
        0.0,
        help="milliseconds between two copies of new KV blocks to another decode worker, where requests go on sooner "
        "if this one is lost; about 2 % of the processor time at 500; 0 makes none",
        minimum=0,
    )
    max_reserved_share: float = option(0.5, help="share of the KV blocks that may wait for transfers", minimum=0.01)

    @property
    def max_decoding(self) -> int:
        """Maximum number of sequences that one step decodes."""
        return self.max_num_seqs or self.default_step.sequences

    def num_layer_groups(self, num_layers: int) -> int:
        """Number of groups in which a model's layers are received. Raises `SetupError` if it exceeds `num_layers`."""
        if self.layer_groups is None:
            # C++ computes all layers in one call: there is nothing to send in the meantime.
            return 1 if self.device.startswith("cpu") else min(GPU_LAYER_GROUPS, num_layers)
        if self.layer_groups > num_layers:
            raise SetupError(
                f"--layer-groups is {self.layer_groups}, but the model has {num_layers} layers. Set at most that."
            )
        return self.layer_groups
