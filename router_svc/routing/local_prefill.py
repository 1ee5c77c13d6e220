"""Conditional disaggregation: whether a decode worker prefills a prompt itself, by length and by load. Pure policy.

A short uncached remainder costs less to compute than to hand over. While prompts queue at the prefill tier, a decode
worker that would have the first token clearly sooner also prefills longer ones, so both tiers compute in a burst. It
computes them in chunks that keep its own streams within their ITL budget, and is therefore slower while it decodes.
Source: NVIDIA Dynamo's conditional disaggregation, by prompt length and prefill queue length. Here predicted times are
compared instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from pdserve.peers.workers import WorkerLoad
from router_svc.routing.in_flight import InFlight
from router_svc.routing.placement import Placement, num_sequences, queued_tokens

#: Value of `DecodeStart.local_prefill_threshold` with which the decode worker prefills every prompt.
ALWAYS_LOCAL = 2**32 - 1
#: Local prefill must take at most this share of the remote prefill's time, and save at least this much. Predictions are
#: coarse, and local prefill slows the decode worker's streams.
CLEARLY_SOONER = 0.8
WORTHWHILE_S = 0.05
#: Assumed prefill speed of a decode worker with running sequences, relative to an idle one, until it has been measured.
_SPEED_WHILE_DECODING = 0.5


class LocalPrefillReason(StrEnum):
    """Why a decode worker prefilled a prompt."""

    #: At most `--local-prefill-threshold` tokens were not cached there.
    SHORT = "short"
    #: It was predicted to have the first token clearly sooner than the prefill tier.
    LOAD = "load"
    #: No prefill worker could compute it.
    FALLBACK = "fallback"
    #: The cluster is configured without prefill workers.
    NO_PREFILL_TIER = "no_prefill_tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBacklog:
    """Everything one worker computes until the prompt's first token, and how fast."""

    #: Tokens of other prompts, which come first.
    queued_tokens: int
    #: Tokens of this prompt that the worker has not cached.
    uncached_tokens: int
    tokens_per_s: float

    @property
    def seconds(self) -> float:
        """The predicted time until the first token."""
        tokens = self.queued_tokens + self.uncached_tokens
        return tokens / self.tokens_per_s if self.tokens_per_s > 0 else math.inf

    def __str__(self) -> str:
        return f"{self.seconds * 1000:.0f} ms ({self.queued_tokens} + {self.uncached_tokens} tokens)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Where the prompt should be prefilled. The decode worker decides: it knows exactly what it has cached."""

    #: The decode worker prefills when at most this many tokens are uncached there.
    threshold: int
    #: Reason for the record if the decode worker prefills.
    reason: LocalPrefillReason
    #: Comparison for the decision record; empty when nothing was compared.
    why: str = ""
    #: Reason that is counted as a fallback of the prefill tier; empty: it is none.
    fallback: str = ""


def plan_without_prefill(*, expects_prefill: bool, has_other_layouts: bool) -> PrefillPlan:
    """Local prefill of every prompt: no prefill worker could hand over to the decode worker.

    `has_other_layouts`: there are prefill workers, but their KV layout is another one, as during a rollout.
    """
    if not expects_prefill:
        return PrefillPlan(threshold=ALWAYS_LOCAL, reason=LocalPrefillReason.NO_PREFILL_TIER)
    return PrefillPlan(
        threshold=ALWAYS_LOCAL,
        reason=LocalPrefillReason.FALLBACK,
        why="every prefill worker has another KV layout" if has_other_layouts else "",
        fallback="layout_mismatch" if has_other_layouts else "no_prefill_worker",
    )


def plan_by_length(threshold: int) -> PrefillPlan:
    """Local prefill up to `threshold` uncached tokens."""
    return PrefillPlan(threshold=threshold, reason=LocalPrefillReason.SHORT)


def plan_by_load(threshold: int, decode: Placement, prefill: Placement, in_flight: InFlight) -> PrefillPlan:
    """Local prefill also of longer prompts, if the decode worker is clearly sooner than the prefill worker."""
    is_decoding = num_sequences(decode.worker, in_flight) > 0
    rates = prefill_rates(decode.worker.load, prefill.worker.load, is_decoding=is_decoding)
    if rates is None or decode.uncached_tokens <= threshold:
        return plan_by_length(threshold)
    here, there = (
        ComputeBacklog(
            queued_tokens=queued_tokens(placement.worker, in_flight),
            uncached_tokens=placement.uncached_tokens,
            tokens_per_s=rate,
        )
        for placement, rate in zip((decode, prefill), rates, strict=True)
    )
    why = f"first token in about {here} there, {there} through {prefill.worker.worker_id}"
    if not is_clearly_sooner(here, there):
        return PrefillPlan(threshold=threshold, reason=LocalPrefillReason.SHORT, why=why)
    # No more tokens than expected are prefilled here: if the index overstated what is cached, this choice may be wrong.
    return PrefillPlan(
        threshold=decode.uncached_tokens, reason=LocalPrefillReason.LOAD, why=f"{why}: prefills by itself"
    )


def is_clearly_sooner(here: ComputeBacklog, there: ComputeBacklog) -> bool:
    """Whether local prefill saves enough to be worth slowing down the decode worker's streams.

    A difference in measured rates alone may be noise. A prompt therefore goes to an idle prefill worker unless that
    worker has less of it cached.
    """
    if there.queued_tokens == 0 and here.uncached_tokens >= there.uncached_tokens:
        return False
    return here.seconds <= CLEARLY_SOONER * there.seconds and there.seconds - here.seconds >= WORTHWHILE_S


def prefill_rates(decode: WorkerLoad, prefill: WorkerLoad, *, is_decoding: bool) -> tuple[float, float] | None:
    """Prefill speed of the decode worker and of the prefill worker, in prompt tokens per second.

    A worker without a measurement is assumed to be as fast as the other. None if neither has one.
    """
    known = prefill.prefill_tokens_per_s or decode.prefill_tokens_per_s
    if known is None:
        return None
    if not is_decoding:
        return decode.prefill_tokens_per_s or known, known
    measured = decode.prefill_tokens_per_s_while_decoding
    return known * _SPEED_WHILE_DECODING if measured is None else measured, known
