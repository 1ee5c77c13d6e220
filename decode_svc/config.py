"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.config import option
from pdserve.base.worker_config import WorkerConfig


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
    max_reserved_share: float = option(0.5, help="share of the blocks that waiting transfers may hold", minimum=0.01)

    @property
    def max_decoding(self) -> int:
        """Sequences that one step decodes at most."""
        return self.max_num_seqs
