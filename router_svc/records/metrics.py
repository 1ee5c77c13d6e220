"""The router's Prometheus metrics. Names follow vLLM's where the meaning is the same, with our prefix."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence

from pdserve import __version__
from pdserve.base.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    StaleError,
    TransferError,
    error_classes,
    reason_of_class,
)
from pdserve.base.sampling import FinishReason
from pdserve.net.admin import Health
from pdserve.observe.metrics import (
    PEER_MESSAGES_REFUSED,
    CounterReader,
    CounterSource,
    GaugeReader,
    GaugeSource,
    HistogramReader,
    TokenHistogram,
    process_registry,
)
from pdserve.peers.seals import Refusal
from router_svc.records.exemplars import exemplar_labels
from router_svc.records.families import Families, TenantReader
from router_svc.records.loop_lag import LoopLag
from router_svc.records.migration_metrics import MigrationMetrics
from router_svc.records.milestones import Milestone
from router_svc.records.pause_metrics import PauseMetrics
from router_svc.records.record import Record
from router_svc.records.request_state import RequestState
from router_svc.records.timeline import Phase
from router_svc.records.usage import TenantTotals
from router_svc.routing.local_prefill import LocalPrefillReason

#: Subjects of degraded service.
DEGRADABLE = ("redis", "state", "model", "prefill", "layout", "transport")
TIERS = ("prefill", "decode")

REJECTIONS = ("queue_full", "no_decode_worker", "draining", "queue_timeout", "displaced", "rate_limited", "quarantined")
OUTCOMES = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)
ENDS = ("disconnected", *(reason_of_class(error) for error in (DeadlineExceeded, Cancelled)))
FINISH_REASONS = tuple(reason.value for reason in FinishReason)
#: Errors after which a request may be tried again.
_FAILURES = tuple(
    reason_of_class(error)
    for error in error_classes().values()
    if issubclass(error, (CapacityError, TransferError, StaleError))
)

# fmt: off
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_TOKEN_TIME_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST_TIME_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
_LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class RouterMetrics:
    """All metrics of the requests for one model, and of the router's process. Only Prometheus reads them."""

    def __init__(self, *, model_name: str, first: RouterMetrics | None = None) -> None:
        """`first`: the metrics of the first model in the process, which has the process's. None: these are they."""
        families = Families(process_registry(), model_name) if first is None else first._families.of_model(model_name)
        self._families: Families = families
        self.registry = families.registry
        self._labels = families.common
        self._process: _Process = _Process(families) if first is None else first._process
        self.clock_skew, self.loop_lag = self._process.clock_skew, self._process.loop_lag
        self._add_load(families)
        self._add_decisions(families)
        self._add_tokens(families)
        self._distributions = _Distributions(families)
        self._time_to_first_token = families.histogram(
            "time_to_first_token_seconds", "Time from accepting a request to writing its first token", _TTFT_BUCKETS
        )
        self.pauses = PauseMetrics(families, _FAILURES, _TTFT_BUCKETS)
        self.migrations = MigrationMetrics(families)
        self.tenants = TenantTotals()
        self._process.tenants.add(families.common, self.tenants)
        self.inter_token_latency = TokenHistogram(_TOKEN_TIME_BUCKETS, self._labels)
        self._process.inter_token_latency.add(self.inter_token_latency)

    def of_model(self, model_name: str) -> RouterMetrics:
        """Metrics of another model in the same process."""
        return RouterMetrics(model_name=model_name, first=self)

    def peer_refused(self, reason: Refusal) -> None:
        """A worker's record is not of this cluster."""
        self._process.peer_refusals.inc(reason)

    def watch_ready(self, health: Health) -> None:
        """Exports whether the router is ready, as of each scrape."""
        self._process.ready.set_function(lambda: float(health.is_ready))

    def _add_load(self, families: Families) -> None:
        self.num_requests_running = families.gauge("num_requests_running", "Requests admitted and not ended")
        self.num_requests_waiting = families.gauge("num_requests_waiting", "Requests in the admission queue")
        self.queued_uncached_tokens = families.gauge(
            "queued_uncached_tokens", "Uncached prompt tokens of requests in the admission queue"
        )
        self._workers_ready = families.gauge_by("tier", "workers_ready", "Workers that accept requests")
        for tier in TIERS:
            self._workers_ready.at(tier)

    def _add_decisions(self, families: Families) -> None:
        self._admission_rejections = families.counter_by(
            "reason", "admission_rejections", "Requests refused", REJECTIONS
        )
        self._request_success = families.counter_by(
            "finished_reason", "request_success", "Choices completed", FINISH_REASONS
        )
        self._request_outcomes = families.counter_by("outcome", "request_outcomes", "Requests ended", OUTCOMES)
        self._requests_ended_early = families.counter_by(
            "reason", "requests_ended_early", "Requests ended before they were complete, by their client", ENDS
        )
        self._request_retries = families.counter_by(
            "reason", "request_retries", "Times a request was retried", _FAILURES
        )
        self._numerics_changes = families.counter(
            "numerics_changes", "Times an answer went on with a worker of another numerics class"
        )
        self._prefill_fallbacks = families.counter_by(
            "reason",
            "prefill_fallbacks",
            "Prompts prefilled by a decode worker because no prefill worker could",
            ("no_prefill_worker", "layout_mismatch", "not_receivable", "quarantine", *_FAILURES),
        )
        self._prefills = families.counter_by("tier", "prefills", "Prompts by the tier that prefilled them", TIERS)
        self._local_prefills = families.counter_by(
            "reason",
            "local_prefills",
            "Prompts prefilled by a decode worker",
            LocalPrefillReason,
        )

    def _add_tokens(self, families: Families) -> None:
        self._requests_received = families.counter("requests_received", "Requests on arrival, refused ones too")
        self._received_prompt_tokens = families.counter(
            "received_prompt_tokens", "Prompt tokens on arrival, of refused requests too"
        )
        self._received_uncached_tokens = families.counter(
            "received_uncached_tokens", "Prompt tokens on arrival that no worker had cached, of refused requests too"
        )
        self._prompt_tokens = families.counter("prompt_tokens", "Prompt tokens of requests that got a first token")
        self._prompt_tokens_cached = families.counter(
            "prompt_tokens_cached", "Prompt tokens that the prefilling worker had cached"
        )
        self._generation_tokens = families.counter("generation_tokens", "Tokens sent to clients")

    def read(self, *sources: CounterSource) -> None:
        """Exports counters that other objects keep."""
        CounterReader(self.registry, self._labels, *sources)

    def read_gauges(self, *sources: GaugeSource) -> None:
        """Exports numbers that other objects keep, and that may not be known."""
        self._process.gauges.add(self._labels, *sources)

    def received(self, prompt_tokens: Sequence[int], uncached_tokens: Sequence[int]) -> None:
        """Prompts of these lengths have arrived; they may be refused yet."""
        self._requests_received.inc(len(prompt_tokens))
        self._received_prompt_tokens.inc(sum(prompt_tokens))
        self._received_uncached_tokens.inc(sum(uncached_tokens))

    def rejected(self, reason: str) -> None:
        """A request was refused before it was admitted."""
        self._admission_rejections.inc(reason)

    def ended_early(self, reason: str) -> None:
        """A request was ended before it was complete."""
        self._requests_ended_early.inc(reason)

    def numerics_changed(self) -> None:
        """An answer goes on with a worker that may compute other bits."""
        self._numerics_changes.inc()

    def retried(self, reason: str) -> None:
        """A request is retried."""
        self._request_retries.inc(reason)

    def fell_back(self, reason: str) -> None:
        """A decode worker prefills because no prefill worker can."""
        self._prefill_fallbacks.inc(reason)

    def wrote_first_token(self, record: Record) -> None:
        """The first token of a client request was written; `record` is its first prompt's."""
        seconds = record.milestones[Milestone.FIRST_WRITE]
        self._time_to_first_token.observe(seconds, exemplar_labels(record.request_id))

    def set_workers(self, tier: str, ready: int) -> None:
        """Sets the number of workers of a tier that accept requests."""
        self._workers_ready.at(tier).set(ready)

    def watch_degraded(self, degraded: Collection[str]) -> None:
        """Exports which subjects are in `degraded`, as of each scrape."""
        for subject in DEGRADABLE:
            self._process.degraded.at(subject).set_function(functools.partial(degraded.__contains__, subject))

    def ended(self, record: Record) -> None:
        """Counts a request that has ended."""
        end, prefill = record.end, record.prefill
        self._request_outcomes.inc(record.state)
        for reason in () if end is None else end.finish_reasons:
            self._request_success.inc(reason)
        if prefill.tier is not None:
            self._prefills.inc(prefill.tier)
        if prefill.local_reason is not None:
            self._local_prefills.inc(prefill.local_reason)
        self._generation_tokens.inc(record.completion_tokens - (record.resumed_tokens or 0))
        is_scored_alone = prefill.tier is not None and not record.max_tokens
        if (is_scored_alone or Milestone.FIRST_TOKEN in record.milestones) and not record.resumed_tokens:
            self._prompt_tokens.inc(record.prompt_tokens)
            self._prompt_tokens_cached.inc(record.cached_tokens)
        # Times of a request that another router has had since before are not its times.
        if record.resumed_tokens is None:
            self._distributions.observe(record)


class _Process:
    """Metrics of the process. They have the label of its first model."""

    def __init__(self, families: Families) -> None:
        families.gauge("start_time_seconds", "Unix time of this process's start").set(time.time())
        families.gauge_by("version", "router_info", "Constant 1; this router").at(__version__).set(1)
        self.ready = families.gauge("ready", "1 while the router accepts requests")
        self.peer_refusals = families.counter_by("reason", "peer_messages_refused", PEER_MESSAGES_REFUSED, Refusal)
        self.clock_skew = families.gauge("clock_skew_seconds", "Seconds by which this clock is ahead of that of Redis")
        self.degraded = families.gauge_by("subject", "degraded", "1 while the service is degraded")
        self.loop_lag = LoopLag(families.registry, families.common)
        self.gauges = GaugeReader(families.registry, families.common)
        self.tenants = TenantReader(families.registry)
        self.inter_token_latency = HistogramReader(
            families.registry, "inter_token_latency_seconds", "Time between two messages with tokens of one request"
        )


class _Distributions:
    """Histograms over requests that have ended."""

    def __init__(self, families: Families) -> None:
        self._phases = families.histograms_by(
            "phase", "request_phase_seconds", "Time of a request in each phase", _TTFT_BUCKETS, Phase
        )
        self._time_per_output_token = families.histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", _TOKEN_TIME_BUCKETS
        )
        self._e2e = families.histogram(
            "e2e_request_latency_seconds", "Time from accept to finish", _REQUEST_TIME_BUCKETS
        )
        self._queue_time = families.histogram(
            "request_queue_time_seconds", "Time from accept to admission", _REQUEST_TIME_BUCKETS
        )
        self._handover_gap = families.histogram(
            "handover_gap_seconds",
            "Time from the first token, by a prefill worker, to the second, by a decode worker",
            _TTFT_BUCKETS,
        )
        self._prompt_tokens = families.histogram("request_prompt_tokens", "Prompt length", _LENGTH_BUCKETS)
        self._generation_tokens = families.histogram(
            "request_generation_tokens", "Completion length over all choices", _LENGTH_BUCKETS
        )

    def observe(self, record: Record) -> None:
        """Observes the phases of every request, since those that fail have waited, too; the rest of finished ones."""
        exemplar = exemplar_labels(record.request_id)
        for phase, seconds in record.seconds_in().items():
            self._phases[phase].observe(seconds, exemplar)
        if record.state == "finished":
            self._observe_finished(record, exemplar)

    def _observe_finished(self, record: Record, exemplar: dict[str, str]) -> None:
        reached = record.milestones
        self._e2e.observe(reached[Milestone.FINISH], exemplar)
        self._queue_time.observe(reached[Milestone.ADMITTED], exemplar)
        self._prompt_tokens.observe(record.prompt_tokens)
        self._generation_tokens.observe(record.completion_tokens)
        mean_length = record.completion_tokens / record.n
        if mean_length > 1:
            decode_s = reached[Milestone.FINISH] - reached[Milestone.FIRST_TOKEN]
            self._time_per_output_token.observe(decode_s / (mean_length - 1), exemplar)
        if record.prefill.tier == "prefill" and Milestone.FIRST_DECODE in reached:
            gap_s = max(reached[Milestone.FIRST_DECODE] - reached[Milestone.FIRST_TOKEN], 0.0)
            self._handover_gap.observe(gap_s, exemplar)
