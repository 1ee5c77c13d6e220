"""A worker's Prometheus metrics. Names follow vLLM's where the meaning is the same, with our prefix and a tier."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from pdserve.base.errors import (
    PdserveError,
    StaleAttempt,
    StaleEpoch,
    StaleError,
    TransferTimeout,
    error_classes,
    reason_of,
    reason_of_class,
)
from pdserve.net.admin import Health
from pdserve.observe.machine import available_memory_bytes
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

LABELS = ("model_name", "tier")

#: Outcomes of transfers without an error, and the direction in which a tier moves blocks.
_OUTCOMES = {"prefill": ("committed", "not_needed", "aborted"), "decode": ("committed",)}
_DIRECTIONS = {"prefill": "sent", "decode": "received"}

#: Messages that can be stale, and why: the transfer has ended, or another attempt or epoch is here.
_STALE_MESSAGES = {"prefill": ("start", "event"), "decode": ("start", "event", "commit", "renewal", "prefill_locally")}
_STALE_REASONS = tuple(map(reason_of_class, (StaleError, StaleAttempt, StaleEpoch)))
#: Who changes roles: an operator, or the policy of routers.
ROLE_REASONS = ("operator", "policy")
#: Share of a transfer's messages that had arrived when its lease ended.
_ARRIVED = ("nothing", "some", "all")

_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TRANSFER_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class WorkerMetrics:
    """All metrics of one worker process, set by its services and read by Prometheus alone."""

    def __init__(self, *, model_name: str, tier: str) -> None:
        self.registry = process_registry()
        self._labels = {"model_name": model_name, "tier": tier}
        self._add_process()
        self._add_requests()
        self._add_steps()
        self._add_transfers()
        self._add_paths()
        self._worker_info = self._info(
            "worker_info",
            "Constant 1; identity and settings of this worker",
            "worker_id",
            "epoch",
            "transport",
            "device",
            "tensor_parallel_size",
            "dtype",
            "block_size",
            "version",
            "numerics_class",
        )
        self._kernels_info = self._info(
            "kernels_info",
            "Constant 1; the kernels in use, and the reason when they are not the C++ ones",
            "kernels",
            "instruction_set",
            "quantization",
            "mode",
            "reason",
        )

    def _add_process(self) -> None:
        self._gauge("start_time_seconds", "Unix time of this process's start").set(time.time())
        self._ready = self._gauge("ready", "1 while the process accepts work, 0 while it loads or drains")
        self.memory_available = self._gauge("memory_available_bytes", "Memory that can still be allocated")
        self.memory_available.set_function(available_memory_bytes)
        self.clock_skew = self._gauge("clock_skew_seconds", "Seconds by which this clock is ahead of that of Redis")
        self._peer_refusals = self._counter("peer_messages_refused", PEER_MESSAGES_REFUSED, "reason")
        for reason in Refusal:
            self._peer_refusals.labels(**self.labels(reason=reason))
        self._last_exit = self._info("last_exit_info", "Constant 1; how this worker ended last", "reason", "during")

        self._role = self._info("worker_role", "1 for the worker's present role, 0 for the other one", "role")
        self.former_role_requests = self._gauge(
            "former_role_requests", "Requests that the worker still has from before it changed its role"
        )
        self._role_changes = self._counter("role_changes", "Changes of the worker's role", "role", "reason")
        for role, why in itertools.product(_OUTCOMES, ROLE_REASONS):
            self._role_changes.labels(**self.labels(role=role, reason=why))

    def _add_requests(self) -> None:
        self.num_requests_running = self._gauge("num_requests_running", "Requests that take part in steps")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests that wait for blocks or for a step")
        self.queued_prompt_tokens = self._gauge("queued_prompt_tokens", "Prompt tokens accepted but not yet computed")
        self.kv_cache_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks of this worker")
        self.kv_blocks_free = self._gauge(
            "kv_blocks_free", "KV blocks that no request holds (cached prefixes count as free)"
        )
        self.kv_blocks_held = self._gauge("kv_blocks_held", "KV blocks that requests hold, without reserved ones")
        self.kv_blocks_reserved = self._gauge("kv_blocks_reserved", "KV blocks held for transfers into this worker")
        self.kv_blocks_waiting = self._gauge("kv_blocks_waiting", "KV blocks that waiting requests need")
        self.max_num_seqs = self._gauge("max_num_seqs", "Sequences that a step can compute")

    def _add_steps(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed")
        self.generation_tokens = self._counter("generation_tokens", "Tokens sampled")
        self.sampling_failures = self._counter(
            "sampling_failures", "Requests ended because logits had no finite maximum"
        )
        self.unprepared_requests = self._counter(
            "unprepared_requests", "Requests ended because their part of a step could not be prepared"
        )
        self.schedule_s, self.build_s, self.forward_s, self.sample_s = phases = [
            TokenHistogram(_STEP_BUCKETS, self.labels(phase=phase))
            for phase in ("schedule", "build", "forward", "sample")
        ]
        HistogramReader(self.registry, "engine_step_seconds", "Duration of a step's phase", *phases)
        self.iteration_tokens = TokenHistogram(_TOKEN_BUCKETS, self._labels)
        HistogramReader(self.registry, "iteration_tokens", "Tokens of a step", self.iteration_tokens)
        self.step_loop_stalled = self._gauge(
            "step_loop_stalled_seconds",
            "Age of the running step, or of the last one while work is queued; 0 without work",
        )
        self.steps_ahead = self._counter("steps_ahead", "Steps launched while the previous one was still running")

    def _add_transfers(self) -> None:
        self.kv_transfer_bytes = self._counter(
            "kv_transfer_bytes", "KV bytes sent or received", "direction", "transport"
        )
        self.kv_transfer_blocks = self._counter("kv_transfer_blocks", "KV blocks sent or received", "direction")
        self.kv_transfers = self._counter("kv_transfers", "Transfers by outcome", "outcome")
        # A counter that appears with its first event hides that event from `rate` and `increase`.
        errors = tuple(map(reason_of_class, error_classes().values()))
        for outcome in (*_OUTCOMES[self._labels["tier"]], *errors):
            self.kv_transfers.labels(**self._labels, outcome=outcome)
        self.kv_transfer_blocks.labels(**self._labels, direction=_DIRECTIONS[self._labels["tier"]])
        self.stale_messages = self._counter(
            "stale_messages", "Messages of older attempts, epochs or transfers, which were dropped", "message", "reason"
        )
        for message, reason in itertools.product(_STALE_MESSAGES[self._labels["tier"]], _STALE_REASONS):
            self.stale_messages.labels(**self._labels, message=message, reason=reason)
        self.leases_expired = self._counter(
            "leases_expired", "Reservations that ended with their lease, by what had arrived", "arrived"
        )
        for arrived in _ARRIVED:
            self.leases_expired.labels(**self._labels, arrived=arrived)
        self._replications = self._counter("replications", "Copies of KV blocks that left this worker", "outcome")
        for outcome in ("committed", "not_needed", *errors):
            self._replications.labels(**self._labels, outcome=outcome)
        self._num_sending = 0
        #: Transfers into this worker.
        self.num_receiving: Callable[[], int] = lambda: 0
        active = self._gauge("kv_transfers_active", "Transfers that hold blocks or a lease")
        active.set_function(lambda: self.num_active_transfers)
        self.kv_transfer_seconds = self._histogram(
            "kv_transfer_seconds",
            "Prefill: time with a block on the wire. Decode: first to last block, computing in between included",
        )
        self.kv_transfer_exposed_seconds = self._histogram(
            "kv_transfer_exposed_seconds",
            "Prefill: from the end of a prompt's last step until its last byte has left",
        )

    def _add_paths(self) -> None:
        self._transport_path_info = self._info(
            "transport_path_info",
            "Constant 1 for each connected peer; the path that its blocks take, and the one expected",
            "peer",
            "expected",
            "actual",
        )
        self.transport_degraded = self._gauge("transport_degraded", "1 while a path is slower than expected")
        self.transport_guarded = self._gauge("transport_guarded", "1 if strangers are kept out of UCX's ports")

    def set_transport_paths(self, paths: Mapping[str, tuple[str, str, bool]]) -> None:
        """Replaces the paths: expected, actual and whether it is degraded, by peer."""
        self._transport_path_info.clear()
        for peer, (expected, actual, _) in paths.items():
            self._transport_path_info.labels(**self.labels(peer=peer, expected=expected, actual=actual)).set(1)
        self.transport_degraded.set(any(is_degraded for _, _, is_degraded in paths.values()))

    def describe(self, worker: Mapping[str, str], kernels: Mapping[str, str]) -> None:
        """Sets the info metrics, which have these labels in addition to the common ones."""
        self._worker_info.labels(**self.labels(**worker)).set(1)
        self._kernels_info.labels(**self.labels(**kernels)).set(1)
        direction = _DIRECTIONS[self._labels["tier"]]
        self.kv_transfer_bytes.labels(**self.labels(direction=direction, transport=worker["transport"]))

    def watch(self, health: Health) -> None:
        """Exposes whether the process is ready, as of each scrape."""
        self._ready.set_function(lambda: float(health.is_ready))

    def peer_refused(self, reason: Refusal) -> None:
        """A message came that is not of this cluster."""
        self._peer_refusals.labels(**self.labels(reason=reason)).inc()

    def describe_last_exit(self, reason: str, during: str) -> None:
        """Sets how the previous process of this worker ended."""
        self._last_exit.labels(**self.labels(reason=reason, during=during)).set(1)

    def read(self, *sources: CounterSource) -> None:
        """Exposes counters that other objects keep."""
        CounterReader(self.registry, self._labels, *sources)

    def read_gauges(self, *sources: GaugeSource) -> None:
        """Exposes numbers that other objects keep, and that may not be known."""
        GaugeReader(self.registry, self._labels, *sources)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Counts a transfer out of this worker as active until the block ends."""
        self._num_sending += 1
        try:
            yield
        finally:
            self._num_sending -= 1

    def set_role(self, role: str) -> None:
        """The worker has this role."""
        for each in _OUTCOMES:
            self._role.labels(**self.labels(role=each)).set(each == role)

    def role_changed(self, role: str, reason: str) -> None:
        """The worker has changed to this role."""
        self._role_changes.labels(**self.labels(role=role, reason=reason)).inc()

    @property
    def num_active_transfers(self) -> int:
        """Transfers that hold blocks or a lease, in both directions."""
        return self._num_sending + self.num_receiving()

    def sent(self, num_bytes: int, num_blocks: int, busy_s: float, transport: str) -> None:
        """A transfer out of this worker ended."""
        self._moved("sent", num_bytes, num_blocks, busy_s, transport)

    def received(self, num_bytes: int, num_blocks: int, busy_s: float, transport: str) -> None:
        """A transfer into this worker was verified."""
        self._moved("received", num_bytes, num_blocks, busy_s, transport)
        self.ended("committed")

    def ended(self, outcome: str) -> None:
        """A transfer ended with this outcome."""
        self.kv_transfers.labels(**self._labels, outcome=outcome).inc()

    def replicated(self, outcome: str) -> None:
        """Copies of blocks were sent to another decode worker, or not needed there, or failed."""
        self._replications.labels(**self._labels, outcome=outcome).inc()

    def stale(self, message: str, error: PdserveError) -> None:
        """Counts a message that was refused with this error, if the error says that it is stale."""
        if isinstance(error, StaleError):
            self.stale_messages.labels(**self._labels, message=message, reason=reason_of(error)).inc()

    def not_received(self, error: PdserveError) -> None:
        """A reservation ended without its blocks."""
        self.ended(reason_of(error))
        if isinstance(error, TransferTimeout):
            self.leases_expired.labels(**self._labels, arrived=error.progress).inc()

    def labels(self, **more: str) -> dict[str, str]:
        """The labels that every metric has, and `more`."""
        return {**self._labels, **more}

    def _moved(self, direction: str, num_bytes: int, num_blocks: int, busy_s: float, transport: str) -> None:
        self.kv_transfer_bytes.labels(**self._labels, direction=direction, transport=transport).inc(num_bytes)
        self.kv_transfer_blocks.labels(**self._labels, direction=direction).inc(num_blocks)
        if num_blocks:
            self.kv_transfer_seconds.observe(busy_s)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pdserve_{name}", text, LABELS, registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(f"pdserve_{name}", text, [*LABELS, *labels], registry=self.registry)
        return counter if labels else counter.labels(**self._labels)

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(f"pdserve_{name}", text, LABELS, buckets=_TRANSFER_BUCKETS, registry=self.registry)
        return histogram.labels(**self._labels)

    def _info(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pdserve_{name}", text, [*LABELS, *labels], registry=self.registry)
