"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.config import option
from pdserve.base.errors import SetupError
from pdserve.worker.config import GPU_LAYER_GROUPS, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """What a decode worker needs to know at start."""

    stream_port: int = option(0, help="port that routers send requests to; 0 takes a free one", minimum=0)
    max_num_seqs: int = option(64, help="sequences decoded in one step", minimum=1)
    itl_budget_ms: float = option(
        50.0,
        help="longest step, in milliseconds, that prompt tokens computed beside running sequences may make",
        minimum=1.0,
    )
    lease_s: float = option(20.0, help="seconds without progress after which a transfer is given up", minimum=0.1)
    layer_groups: int | None = option(
        None,
        help="messages in which a KV block comes, each some of its layers, sent while later ones are computed; at most "
        f"one per layer; when absent {GPU_LAYER_GROUPS} on a GPU and 1 on a CPU",
        minimum=1,
    )
    max_reserved_share: float = option(0.5, help="share of the blocks that waiting transfers may hold", minimum=0.01)

    @property
    def max_decoding(self) -> int:
        """Sequences that one step decodes at most."""
        return self.max_num_seqs

    def groups_of(self, num_layers: int) -> int:
        """In how many groups the layers of a model are received. Raises `SetupError` for more than it has layers."""
        if self.layer_groups is None:
            # C++ computes all layers in one call: there is nothing to send meanwhile.
            return 1 if self.device.startswith("cpu") else min(GPU_LAYER_GROUPS, num_layers)
        if self.layer_groups > num_layers:
            raise SetupError(f"--layer-groups {self.layer_groups} is more than the model has layers, {num_layers}.")
        return self.layer_groups
