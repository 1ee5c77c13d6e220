"""Carries what each step tells into metrics, the load report and the prefix index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.base.ids import BlockHash
from pdserve.base.metrics import CounterSource
from pdserve.engine.pace import Pace
from pdserve.engine.step import Load, StepOutput
from pdserve.worker.serve.metrics import WorkerMetrics

_EMPTY = Load(
    num_running=0,
    num_waiting=0,
    num_held=0,
    queued_prompt_tokens=0,
    queued_by_router={},
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
        #: Hears which blocks became reusable and which ceased to be.
        self.on_cache_events: Callable[[Sequence[BlockHash], Sequence[BlockHash]], None] = lambda added, removed: None
        #: Hears that no prompt is left to compute where some were.
        self.on_queue_empty: Callable[[], None] = lambda: None
        self._show_load()

    def _show_load(self) -> None:
        """What the load tells is read when it is scraped, not written with every step."""
        metrics = self._metrics
        metrics.num_requests_running.set_function(lambda: self._load.num_running)
        metrics.num_requests_waiting.set_function(lambda: self._load.num_waiting)
        metrics.queued_prompt_tokens.set_function(lambda: self._load.queued_prompt_tokens)
        metrics.kv_blocks.set_function(lambda: self._load.total_blocks)
        metrics.kv_blocks_free.set_function(lambda: self._load.free_blocks)
        metrics.kv_cache_usage.set_function(lambda: _used_share(self._load))
        metrics.read(
            CounterSource(
                name="num_preemptions",
                text="Sequences put back to recompute for lack of blocks",
                value=lambda: self._load.num_preemptions,
            ),
            CounterSource(
                name="prefix_cache_queries",
                text="Prompt tokens looked up in the prefix cache",
                value=lambda: self._load.prefix_query_tokens,
            ),
            CounterSource(
                name="prefix_cache_hits",
                text="Prompt tokens found in the prefix cache",
                value=lambda: self._load.prefix_hit_tokens,
            ),
        )

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
        had_prompts = self._load.queued_prompt_tokens > 0
        self._load = load
        if had_prompts and not load.queued_prompt_tokens:
            self.on_queue_empty()

    def observe(self, output: StepOutput) -> None:
        """One step."""
        metrics, durations, events = self._metrics, output.durations, output.events
        self.set_load(output.load)
        if output.num_prefill_tokens or self._pace is not None:
            self._pace = output.pace
        if output.num_tokens:
            metrics.iteration_tokens.observe(output.num_tokens)
            metrics.schedule_s.observe(durations.schedule_s)
            metrics.build_s.observe(durations.build_s)
            metrics.forward_s.observe(durations.forward_s)
            metrics.sample_s.observe(durations.sample_s)
        if output.is_ahead:
            metrics.steps_ahead.inc()
        if output.num_prefill_tokens:
            metrics.prompt_tokens.inc(output.num_prefill_tokens)
        if events.tokens:
            told = sum(len(choice.token_ids) for new in events.tokens for choice in new.choices)
            metrics.generation_tokens.inc(told)
        if events.cache.added or events.cache.removed:
            self.on_cache_events(events.cache.added, events.cache.removed)


def _used_share(load: Load) -> float:
    return 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
