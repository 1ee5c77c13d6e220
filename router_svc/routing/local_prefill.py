"""Whether a decode worker computes a prompt by itself: conditional disaggregation, by length and by load. Pure policy.

A short remainder of a prompt costs less to compute than to hand over. And while prompts queue at the prefill tier, a
decode worker that would have the first token clearly sooner takes its share: in a burst, both tiers compute. It does so
in chunks that keep its own streams within their ITL budget, which is why it is slower beside them.
Source: the conditional disaggregation of NVIDIA Dynamo, by the prompt's length and that of the prefill queue; here the
time on either way is compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from pdserve.base.workers import WorkerLoad
from router_svc.routing.placement import InFlight, Placement, num_sequences, queued_tokens

#: Compute every prompt on the decode worker; what `DecodeStart.local_prefill_threshold` says for it.
ALWAYS_LOCAL = 2**32 - 1
#: Local prefill must need at most this share of the other way's time, and save this much: predictions are coarse, and
#: what the decode worker computes costs its streams some speed.
CLEARLY_SOONER = 0.8
WORTHWHILE_S = 0.05
#: How fast a decode worker that has not measured it yet is beside its streams, against a worker without any.
_SHARE_BESIDE_DECODING = 0.5


class LocalPrefillReason(StrEnum):
    """Why a decode worker computed a prompt."""

    #: At most `--local-prefill-threshold` tokens were not cached there.
    SHORT = "short"
    #: It was predicted to have the first token clearly sooner than the prefill tier.
    LOAD = "load"
    #: No prefill worker could.
    FALLBACK = "fallback"
    #: None is meant to.
    NO_PREFILL_TIER = "no_prefill_tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What one worker computes until the prompt's first token is there, and how fast."""

    #: Prompt tokens of others, which come first.
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
    """Which way the prompt is to go. The decode worker has the last word: it knows what it really has cached."""

    #: The decode worker prefills when at most this many tokens are uncached there.
    threshold: int
    #: Why it does, in that case.
    reason: LocalPrefillReason
    #: For the decision record: what was compared; empty when nothing was.
    why: str = ""


def plan_by_length(threshold: int) -> PrefillPlan:
    """Local up to `threshold` uncached tokens."""
    return PrefillPlan(threshold=threshold, reason=LocalPrefillReason.SHORT)


def plan_by_load(threshold: int, decode: Placement, prefill: Placement, in_flight: InFlight) -> PrefillPlan:
    """Local as well where the decode worker is clearly sooner than the prefill worker."""
    is_decoding = num_sequences(decode.worker, in_flight) > 0
    rates = prefill_rates(decode.worker.load, prefill.worker.load, is_decoding=is_decoding)
    if rates is None or decode.uncached_tokens <= threshold:
        return plan_by_length(threshold)
    here, there = (
        Backlog(
            queued_tokens=queued_tokens(placement.worker, in_flight),
            uncached_tokens=placement.uncached_tokens,
            tokens_per_s=rate,
        )
        for placement, rate in zip((decode, prefill), rates, strict=True)
    )
    why = f"first token in about {here} there, {there} through {prefill.worker.worker_id}"
    if not is_clearly_sooner(here, there):
        return PrefillPlan(threshold=threshold, reason=LocalPrefillReason.SHORT, why=why)
    # No more than was expected: when the index was wrong, so may be the choice.
    return PrefillPlan(
        threshold=decode.uncached_tokens, reason=LocalPrefillReason.LOAD, why=f"{why}: prefills by itself"
    )


def is_clearly_sooner(here: Backlog, there: Backlog) -> bool:
    """Whether local prefill is worth what it costs the streams beside it.

    A difference between measured rates alone may be noise: a prompt that finds the prefill tier idle belongs there,
    unless less of it is cached there.
    """
    if there.queued_tokens == 0 and here.uncached_tokens >= there.uncached_tokens:
        return False
    return here.seconds <= CLEARLY_SOONER * there.seconds and there.seconds - here.seconds >= WORTHWHILE_S


def prefill_rates(decode: WorkerLoad, prefill: WorkerLoad, *, is_decoding: bool) -> tuple[float, float] | None:
    """Prompt tokens per second of the decode and of the prefill worker, as far as they have measured.

    One that has not is taken to be as fast as the other. None: nobody has computed a prompt yet.
    """
    known = prefill.prefill_tokens_per_s or decode.prefill_tokens_per_s
    if known is None:
        return None
    if not is_decoding:
        return decode.prefill_tokens_per_s or known, known
    beside = decode.prefill_tokens_per_s_beside_decoding
    return known * _SHARE_BESIDE_DECODING if beside is None else beside, known
