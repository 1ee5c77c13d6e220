"""The router's Prometheus metrics. Names follow vLLM's where the meaning is the same, with our prefix."""

from __future__ import annotations

import functools
from collections.abc import Collection

from prometheus_client import Counter, Gauge, Histogram

from pdserve.base.metrics import CounterReader, CounterSource, HistogramReader, TokenHistogram, process_registry
from router_svc.records.record import Phase, Record

#: What can work less well than it should.
DEGRADABLE = ("redis", "prefill")

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
    """All metrics of the router; nobody reads them but Prometheus."""

    def __init__(self, *, model_name: str) -> None:
        self.registry = process_registry()
        self._model_name = model_name
        # Load
        self.num_requests_running = self._gauge("num_requests_running", "Requests admitted and not ended")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests in the admission queue")
        self.workers_ready = self._labelled_gauge("workers_ready", "Workers that take work", "tier")
        self.degraded = self._labelled_gauge("degraded", "1 while something works less well than it should", "subject")
        # Decisions
        self.admission_rejections = self._counter("admission_rejections", "Requests refused", "reason")
        self.request_success = self._counter("request_success", "Choices completed", "finished_reason")
        self.request_outcomes = self._counter("request_outcomes", "Requests ended", "outcome")
        self.request_retries = self._counter("request_retries", "Times a request was tried again", "reason")
        self.prefill_fallbacks = self._counter(
            "prefill_fallbacks", "Prompts prefilled by a decode worker because no prefill worker could", "reason"
        )
        self.prefills = self._counter("prefills", "Prompts by the tier that prefilled them", "tier")
        self.local_prefills = self._counter("local_prefills", "Prompts prefilled by a decode worker, by why", "reason")
        # Tokens
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token").labels(
            model_name
        )
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Of these, tokens the prefilling worker had cached"
        ).labels(model_name)
        self.generation_tokens = self._counter("generation_tokens", "Tokens given to clients").labels(model_name)
        # Times
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From accepting a request to its first token being written", _TTFT_BUCKETS
        )
        self.inter_token_latency = TokenHistogram(_TOKEN_TIME_BUCKETS, {"model_name": model_name})
        HistogramReader(
            self.registry,
            "inter_token_latency_seconds",
            "Between two messages with tokens of one request",
            self.inter_token_latency,
        )
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", _TOKEN_TIME_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From accept to finish", _REQUEST_TIME_BUCKETS)
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From accept to admission", _REQUEST_TIME_BUCKETS
        )
        self._handover_gap = self._histogram(
            "handover_gap_seconds", "From the first token, by prefill, to the second, by decode", _TTFT_BUCKETS
        )
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", _LENGTH_BUCKETS)
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Completion length, all choices", _LENGTH_BUCKETS
        )

    def read(self, *sources: CounterSource) -> None:
        """Adds counters that are kept elsewhere."""
        CounterReader(self.registry, {"model_name": self._model_name}, *sources)

    def rejected(self, reason: str) -> None:
        """A request was refused before it was admitted."""
        self.admission_rejections.labels(self._model_name, reason).inc()

    def retried(self, reason: str) -> None:
        """A request is tried again."""
        self.request_retries.labels(self._model_name, reason).inc()

    def fell_back(self, reason: str) -> None:
        """A decode worker prefills because no prefill worker can."""
        self.prefill_fallbacks.labels(self._model_name, reason).inc()

    def set_workers(self, tier: str, ready: int) -> None:
        """How many workers of a tier take work."""
        self.workers_ready.labels(self._model_name, tier).set(ready)

    def watch_degraded(self, degraded: Collection[str]) -> None:
        """Shows which subjects are in `degraded`, now and whenever it changes."""
        for subject in DEGRADABLE:
            gauge = self.degraded.labels(self._model_name, subject)
            gauge.set_function(functools.partial(degraded.__contains__, subject))

    def ended(self, record: Record) -> None:
        """Everything that is known once a request has ended."""
        self.request_outcomes.labels(self._model_name, record.state).inc()
        for reason in record.finish_reasons if record.state == "finished" else ():
            self.request_success.labels(self._model_name, reason).inc()
        if record.prefilled_by is not None:
            self.prefills.labels(self._model_name, record.prefilled_by).inc()
        if record.local_prefill_reason is not None:
            self.local_prefills.labels(self._model_name, record.local_prefill_reason).inc()
        self.generation_tokens.inc(record.completion_tokens)
        if Phase.FIRST_TOKEN in record.phases:
            self.prompt_tokens.inc(record.prompt_tokens)
            self.prompt_tokens_cached.inc(record.cached_tokens)
        if record.state == "finished":
            self._observe(record)

    def _observe(self, record: Record) -> None:
        phases = record.phases
        self._e2e.observe(phases[Phase.FINISH])
        self._queue_time.observe(phases[Phase.ADMITTED])
        self._request_prompt_tokens.observe(record.prompt_tokens)
        self._request_generation_tokens.observe(record.completion_tokens)
        longest = record.completion_tokens / record.n
        if longest > 1:
            self._time_per_output_token.observe((phases[Phase.FINISH] - phases[Phase.FIRST_TOKEN]) / (longest - 1))
        if record.prefilled_by == "prefill" and Phase.FIRST_DECODE in phases:
            self._handover_gap.observe(max(phases[Phase.FIRST_DECODE] - phases[Phase.FIRST_TOKEN], 0.0))

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._labelled_gauge(name, text).labels(self._model_name)

    def _labelled_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pdserve_{name}", text, ["model_name", *labels], registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdserve_{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"pdserve_{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)
