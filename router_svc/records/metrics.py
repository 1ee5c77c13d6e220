"""The router's Prometheus metrics. Names follow vLLM's where the meaning is the same, with our prefix."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve import __version__
from pdserve.base.admin import Health
from pdserve.base.errors import CapacityError, StaleError, TransferError, error_classes, reason_of_class
from pdserve.base.metrics import CounterReader, CounterSource, HistogramReader, TokenHistogram, process_registry
from pdserve.base.sampling import FinishReason
from router_svc.records.record import Record, TracePhase
from router_svc.records.request_state import RequestState
from router_svc.routing.local_prefill import LocalPrefillReason

#: Subjects of degraded service.
DEGRADABLE = ("redis", "prefill", "layout", "transport")

REJECTIONS = ("queue_full", "no_decode_worker", "draining", "queue_timeout")
OUTCOMES = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)
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
    """All metrics of the router. Only Prometheus reads them."""

    def __init__(self, *, model_name: str) -> None:
        self.registry = process_registry()
        self._model_name = model_name
        families = _Families(self.registry, model_name)
        self._add_process(families)
        self._add_load(families)
        # Decisions
        self._admission_rejections = families.counter("admission_rejections", "Requests refused", "reason")
        self._request_success = families.counter("request_success", "Choices completed", "finished_reason")
        self._request_outcomes = families.counter("request_outcomes", "Requests ended", "outcome")
        self._request_retries = families.counter("request_retries", "Times a request was retried", "reason")
        self._prefill_fallbacks = families.counter(
            "prefill_fallbacks", "Prompts prefilled by a decode worker because no prefill worker could", "reason"
        )
        self._prefills = families.counter("prefills", "Prompts by the tier that prefilled them", "tier")
        self._local_prefills = families.counter("local_prefills", "Prompts prefilled by a decode worker", "reason")
        # Tokens
        self._prompt_tokens = families.counter(
            "prompt_tokens", "Prompt tokens of requests that got a first token"
        ).labels(model_name)
        self._prompt_tokens_cached = families.counter(
            "prompt_tokens_cached", "Prompt tokens that the prefilling worker had cached"
        ).labels(model_name)
        self._generation_tokens = families.counter("generation_tokens", "Tokens sent to clients").labels(model_name)
        # Times and lengths
        self._distributions = _Distributions(families)
        self.time_to_first_token = families.histogram(
            "time_to_first_token_seconds", "Time from accepting a request to writing its first token", _TTFT_BUCKETS
        )
        self.inter_token_latency = TokenHistogram(_TOKEN_TIME_BUCKETS, {"model_name": model_name})
        HistogramReader(
            self.registry,
            "inter_token_latency_seconds",
            "Time between two messages with tokens of one request",
            self.inter_token_latency,
        )
        self._start_at_zero()

    def _add_process(self, families: _Families) -> None:
        families.gauge("start_time_seconds", "Unix time of this process's start").set(time.time())
        families.labelled_gauge("router_info", "Constant 1; this router", "version").labels(
            self._model_name, __version__
        ).set(1)
        self._ready = families.gauge("ready", "1 while the router accepts requests")
        self.clock_skew = families.gauge("clock_skew_seconds", "Seconds by which this clock is ahead of that of Redis")

    def _add_load(self, families: _Families) -> None:
        self.num_requests_running = families.gauge("num_requests_running", "Requests admitted and not ended")
        self.num_requests_waiting = families.gauge("num_requests_waiting", "Requests in the admission queue")
        self._workers_ready = families.labelled_gauge("workers_ready", "Workers that accept requests", "tier")
        self._degraded = families.labelled_gauge("degraded", "1 while the service is degraded", "subject")

    def _start_at_zero(self) -> None:
        """A counter that appears with its first event hides that event from `rate` and `increase`."""
        counters = {
            self._admission_rejections: REJECTIONS,
            self._request_success: FINISH_REASONS,
            self._request_outcomes: OUTCOMES,
            self._request_retries: _FAILURES,
            self._prefill_fallbacks: ("no_prefill_worker", "not_receivable", *_FAILURES),
            self._prefills: ("prefill", "decode"),
            self._local_prefills: tuple(LocalPrefillReason),
        }
        for counter, values in counters.items():
            for value in values:
                counter.labels(self._model_name, value)

    def watch_ready(self, health: Health) -> None:
        """Exports whether the router is ready, as of each scrape."""
        self._ready.set_function(lambda: float(health.is_ready))

    def read(self, *sources: CounterSource) -> None:
        """Exports counters that other objects keep."""
        CounterReader(self.registry, {"model_name": self._model_name}, *sources)

    def rejected(self, reason: str) -> None:
        """A request was refused before it was admitted."""
        self._admission_rejections.labels(self._model_name, reason).inc()

    def retried(self, reason: str) -> None:
        """A request is retried."""
        self._request_retries.labels(self._model_name, reason).inc()

    def fell_back(self, reason: str) -> None:
        """A decode worker prefills because no prefill worker can."""
        self._prefill_fallbacks.labels(self._model_name, reason).inc()

    def set_workers(self, tier: str, ready: int) -> None:
        """Sets the number of workers of a tier that accept requests."""
        self._workers_ready.labels(self._model_name, tier).set(ready)

    def watch_degraded(self, degraded: Collection[str]) -> None:
        """Exports which subjects are in `degraded`, as of each scrape."""
        for subject in DEGRADABLE:
            gauge = self._degraded.labels(self._model_name, subject)
            gauge.set_function(functools.partial(degraded.__contains__, subject))

    def ended(self, record: Record) -> None:
        """Counts a request that has ended."""
        self._request_outcomes.labels(self._model_name, record.state).inc()
        for reason in record.finish_reasons if record.state == "finished" else ():
            self._request_success.labels(self._model_name, reason).inc()
        if record.prefilled_by is not None:
            self._prefills.labels(self._model_name, record.prefilled_by).inc()
        if record.local_prefill_reason is not None:
            self._local_prefills.labels(self._model_name, record.local_prefill_reason).inc()
        self._generation_tokens.inc(record.completion_tokens)
        if TracePhase.FIRST_TOKEN in record.phases:
            self._prompt_tokens.inc(record.prompt_tokens)
            self._prompt_tokens_cached.inc(record.cached_tokens)
        if record.state == "finished":
            self._distributions.observe(record)


class _Distributions:
    """Histograms over finished requests."""

    def __init__(self, families: _Families) -> None:
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
        phases = record.phases
        self._e2e.observe(phases[TracePhase.FINISH])
        self._queue_time.observe(phases[TracePhase.ADMITTED])
        self._prompt_tokens.observe(record.prompt_tokens)
        self._generation_tokens.observe(record.completion_tokens)
        mean_length = record.completion_tokens / record.n
        if mean_length > 1:
            decode_s = phases[TracePhase.FINISH] - phases[TracePhase.FIRST_TOKEN]
            self._time_per_output_token.observe(decode_s / (mean_length - 1))
        if record.prefilled_by == "prefill" and TracePhase.FIRST_DECODE in phases:
            self._handover_gap.observe(max(phases[TracePhase.FIRST_DECODE] - phases[TracePhase.FIRST_TOKEN], 0.0))


class _Families:
    """Makes metric families of one registry, all with our prefix and the label `model_name`."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

    def gauge(self, name: str, text: str) -> Gauge:
        return self.labelled_gauge(name, text).labels(self._model_name)

    def labelled_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pdserve_{name}", text, ["model_name", *labels], registry=self._registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdserve_{name}", text, ["model_name", *labels], registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"pdserve_{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name)
