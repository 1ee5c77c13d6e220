"""What an operator has to know at once: each problem with its numbers and what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pdserve.peers.workers import Tier, WorkerRecord
from router_svc.api.console.load import LoadSample, TierLoad
from router_svc.records.record_json import Json

Severity = Literal["critical", "warning"]

#: The queue is reported as growing from this length on, if its mean has doubled over the window.
_QUEUE_LENGTH = 8
_QUEUE_GROWTH = 2.0
#: The queue is reported as nearly full from this share of its limit on.
_QUEUE_SHARE = 0.8
#: KV use from which a tier is reported as full.
_KV_FULL = 0.95
#: Failures among recent requests from which they are reported: at least this many, and this share.
_MIN_FAILURES, _FAILURE_SHARE = 3, 0.05
#: Names listed in a text; further ones are counted.
_MAX_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem: a short title, and a text with value, limit and remedy."""

    severity: Severity
    title: str
    text: str

    def as_json(self) -> dict[str, Json]:
        """The problem as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that problems are found in."""

    #: Status and reason of the router's probes, and its degraded subjects with their reasons.
    status: str
    reason: str | None
    degraded: Mapping[str, str]
    #: Names of the models that the router serves.
    models: Sequence[str]
    expects_prefill: bool
    workers: Sequence[WorkerRecord]
    tiers: Mapping[Tier, TierLoad]
    queued: int
    max_queued: int
    #: Samples of the last minute, the oldest first.
    history: Sequence[LoadSample]
    #: Ended requests of the last minutes: how many, how many failed, and the latest error.
    ended: int
    failed: int
    last_error: str


def find_problems(observed: Observed) -> list[Problem]:
    """All problems, critical ones first."""
    found = [
        *_not_serving(observed),
        *_missing_prefill(observed),
        *_degraded(observed),
        *_queue(observed),
        *_full_tiers(observed),
        *_failures(observed),
        *_workers(observed),
    ]
    return sorted(found, key=lambda problem: problem.severity != "critical")


def _not_serving(observed: Observed) -> list[Problem]:
    if observed.status == "ready":
        return []
    reason = observed.reason or observed.status
    if reason == "draining":
        text = "It finishes running requests and refuses new ones. Another router has to answer, or this one to return."
        return [Problem(severity="critical", title="This router is draining", text=text)]
    decode = observed.tiers["decode"]
    text = f"The router is {observed.status.replace('_', ' ')}: {reason}. "
    if decode.workers:
        text += f"{decode.workers} decode {_plural(decode.workers, 'worker is', 'workers are')} registered, none ready."
    else:
        text += "No decode worker is registered. Start one, or check that workers reach Redis."
    return [Problem(severity="critical", title="Requests are refused with 503", text=text)]


def _missing_prefill(observed: Observed) -> list[Problem]:
    prefill, decode = observed.tiers["prefill"], observed.tiers["decode"]
    if not observed.expects_prefill or prefill.ready or not decode.ready:
        return []
    registered = f"{prefill.workers} registered, none ready" if prefill.workers else "none registered"
    text = (
        f"Prefill workers: {registered}. Decode workers compute all prompts, which delays running answers. "
        "Start prefill workers, or check their logs."
    )
    return [Problem(severity="critical", title="The prefill tier is missing", text=text)]


def _degraded(observed: Observed) -> list[Problem]:
    titles = {"redis": "Redis is not available", "state": "The store of responses is not available"}
    return [
        Problem(severity="warning", title=titles.get(subject, f"Degraded: {subject}"), text=_sentence(reason))
        for subject, reason in observed.degraded.items()
        # A missing prefill tier has its own, more precise text, unless only one of several models lacks it.
        if subject != "prefill" or len(observed.models) > 1
    ]


def _queue(observed: Observed) -> list[Problem]:
    queued, limit = observed.queued, observed.max_queued
    if limit and queued >= _QUEUE_SHARE * limit:
        text = f"{queued} prompts wait for admission; from {limit} on, requests get 429. Add decode workers."
        return [Problem(severity="critical", title="The queue is nearly full", text=text)]
    lengths = [sample.queued for sample in observed.history]
    quarter = len(lengths) // 4
    if queued < _QUEUE_LENGTH or not quarter:
        return []
    before, now = sum(lengths[:quarter]) / quarter, sum(lengths[-quarter:]) / quarter
    if now < _QUEUE_GROWTH * before or now < _QUEUE_LENGTH:
        return []
    text = (
        f"{queued} prompts wait for admission, {before:.0f} a minute ago; the limit is {limit}. "
        "Requests arrive faster than the decode tier ends them."
    )
    return [Problem(severity="warning", title="The queue is growing", text=text)]


def _full_tiers(observed: Observed) -> list[Problem]:
    found = []
    for tier, load in observed.tiers.items():
        if load.total_blocks and load.kv_use >= _KV_FULL:
            text = (
                f"{load.kv_use:.0%} of the {tier} tier's {load.total_blocks:,} KV blocks are in use; "
                f"{load.waiting} {_plural(load.waiting, 'request waits', 'requests wait')} on its workers. "
                f"Add {tier} workers, or give them a larger --kv-cache-memory."
            )
            found.append(Problem(severity="warning", title=f"KV blocks of the {tier} tier are used up", text=text))
    return found


def _failures(observed: Observed) -> list[Problem]:
    if observed.failed < _MIN_FAILURES or observed.failed < _FAILURE_SHARE * observed.ended:
        return []
    text = (
        f"{observed.failed} of the last {observed.ended} requests failed. The latest: {_sentence(observed.last_error)}"
    )
    return [Problem(severity="warning", title="Requests fail", text=text)]


def _workers(observed: Observed) -> list[Problem]:
    found = []
    for tier, load in observed.tiers.items():
        waiting = [worker.worker_id for worker in observed.workers if worker.tier == tier and not worker.ready]
        if waiting and load.ready:
            title = f"{len(waiting)} of {load.workers} {tier} workers {_plural(len(waiting), 'is', 'are')} not ready"
            text = f"Loading or draining: {_names(waiting)}."
            found.append(Problem(severity="warning", title=title, text=text))
    slow = [worker for worker in observed.workers if worker.transport.degraded]
    if slow:
        title = f"KV blocks take a slow path on {len(slow)} {_plural(len(slow), 'worker', 'workers')}"
        text = f"{_names([worker.worker_id for worker in slow])}: {_sentence(slow[0].transport.degraded or '')}"
        found.append(Problem(severity="warning", title=title, text=text))
    others = [worker for worker in observed.workers if worker.model not in observed.models]
    if others:
        title = f"{len(others)} {_plural(len(others), 'worker serves', 'workers serve')} another model"
        text = (
            f"The router serves {_names([repr(name) for name in observed.models])} and sends nothing to "
            f"{_names([each.worker_id for each in others])}, "
            f"{_plural(len(others), 'which serves', 'of which the first serves')} {others[0].model!r}. "
            "Give all services the same --served-model-name."
        )
        found.append(Problem(severity="warning", title=title, text=text))
    return found


def _names(names: Sequence[str]) -> str:
    text = ", ".join(names[:_MAX_NAMES])
    return text if len(names) <= _MAX_NAMES else f"{text} and {len(names) - _MAX_NAMES} more"


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
