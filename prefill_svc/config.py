"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """The settings of all workers: prefill workers add none. `max_num_batched_tokens` is their chunk size."""
