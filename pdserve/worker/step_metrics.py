"""Carries what each step tells into metrics, the load report and the prefix index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.base.ids import BlockHash
from pdserve.engine.pace import Pace
from pdserve.engine.step import Load, StepOutput
from pdserve.worker.metrics import WorkerMetrics

_EMPTY = Load(
    num_running=0,
    num_waiting=0,
    num_held=0,
    queued_prompt_tokens=0,
    free_blocks=0,
    total_blocks=0,
    num_preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
)


class StepMetrics:
    """Fed on the event loop: once per step, and whenever the load changed without one."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._load = _EMPTY
        self._pace: Pace | None = None
        # Looked up once: by name it costs as much as the observation.
        self._phases = {
            phase: metrics.step_seconds.labels(**metrics.labels(phase=phase))
            for phase in ("schedule", "build", "forward", "sample")
        }
        #: Hears which blocks became reusable and which ceased to be.
        self.on_cache_events: Callable[[Sequence[BlockHash], Sequence[BlockHash]], None] = lambda added, removed: None

    @property
    def load(self) -> Load:
        """The load as last told."""
        return self._load

    @property
    def pace(self) -> Pace | None:
        """How fast the latest steps were; None before one computed prompt tokens."""
        return self._pace

    def set_load(self, load: Load) -> None:
        """The load now."""
        metrics, before = self._metrics, self._load
        if load == before:
            return
        self._load = load
        metrics.num_requests_running.set(load.num_running)
        metrics.num_requests_waiting.set(load.num_waiting)
        metrics.queued_prompt_tokens.set(load.queued_prompt_tokens)
        metrics.kv_blocks.set(load.total_blocks)
        metrics.kv_blocks_free.set(load.free_blocks)
        metrics.kv_cache_usage.set(1 - load.free_blocks / load.total_blocks)
        metrics.num_preemptions.inc(load.num_preemptions - before.num_preemptions)
        metrics.prefix_cache_queries.inc(load.prefix_query_tokens - before.prefix_query_tokens)
        metrics.prefix_cache_hits.inc(load.prefix_hit_tokens - before.prefix_hit_tokens)

    def observe(self, output: StepOutput) -> None:
        """One step."""
        metrics, durations, events = self._metrics, output.durations, output.events
        self.set_load(output.load)
        if output.num_prefill_tokens or self._pace is not None:
            self._pace = output.pace
        if output.num_tokens:
            metrics.iteration_tokens.observe(output.num_tokens)
            self._phases["schedule"].observe(durations.schedule_s)
            self._phases["build"].observe(durations.build_s)
            self._phases["forward"].observe(durations.forward_s)
            self._phases["sample"].observe(durations.sample_s)
        if output.num_prefill_tokens:
            metrics.prompt_tokens.inc(output.num_prefill_tokens)
        if events.tokens:
            told = sum(len(choice.token_ids) for new in events.tokens for choice in new.choices)
            metrics.generation_tokens.inc(told)
        if events.cache.added or events.cache.removed:
            self.on_cache_events(events.cache.added, events.cache.removed)
