"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.config import option
from pdserve.base.worker_config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """What a prefill worker needs to know at start."""

    max_num_batched_tokens: int = option(512, help="prompt tokens computed in one step: the chunk size", minimum=1)
