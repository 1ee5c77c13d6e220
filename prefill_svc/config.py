"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """What a prefill worker needs to know at start: nothing of its own. `max_num_batched_tokens` is its chunk size."""
