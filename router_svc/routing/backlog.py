"""How long the prompts in the router's queue would keep the tier that computes them busy. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.peers.workers import WorkerRecord


def prefill_backlog_s(queued_tokens: int, workers: Sequence[WorkerRecord]) -> float | None:
    """Seconds that one average worker would need for the tokens: 0 without any, None while no rate is known.

    `workers` are those of the tier that computes prompts. Divided by their number, the sum of this and of their own
    backlogs is how long a prompt that arrives now waits.
    """
    if not queued_tokens:
        return 0.0
    rates = [rate for worker in workers if (rate := _rate(worker)) is not None]
    return queued_tokens / (sum(rates) / len(rates)) if rates else None


def _rate(worker: WorkerRecord) -> float | None:
    load = worker.load
    if load.prefill_tokens_per_s_while_decoding is not None:
        return load.prefill_tokens_per_s_while_decoding
    return load.prefill_tokens_per_s
