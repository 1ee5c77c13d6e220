"""Passes each step's report on to metrics, to the load report and to the prefix index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.base.ids import BlockHash
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Fault
from pdserve.engine.step import Load, StepOutput
from pdserve.observe.metrics import CounterSource, GaugeSource
from pdserve.worker.serve.metrics import WorkerMetrics

_EMPTY = Load(
    num_running=0,
    num_waiting=0,
    num_held=0,
    queued_prompt_tokens=0,
    queued_by_router={},
    free_blocks=0,
    total_blocks=0,
    reserved_blocks=0,
    waiting_blocks=0,
    num_preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
)


class StepMetrics:
    """Updated on the event loop after each step, and whenever the load changes without one."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._load = _EMPTY
        self._pace: Pace | None = None
        #: `TierService.itl_budget_s`.
        self.itl_budget_s: float | None = None
        #: Duration of the longest step so far.
        self.longest_step_s = 0.0
        #: Duration of the last step.
        self.last_step_s = 0.0
        #: Called with the blocks that became reusable and those that no longer are.
        self.on_cache_events: Callable[[Sequence[BlockHash], Sequence[BlockHash]], None] = lambda added, removed: None
        #: Called when the last queued prompt has been computed or dropped.
        self.on_queue_empty: Callable[[], None] = lambda: None
        self._expose_load()
        self._expose_rates()

    def _expose_load(self) -> None:
        """Metrics of the load are computed at each scrape instead of being written with every step."""
        metrics = self._metrics
        metrics.num_requests_running.set_function(lambda: self._load.num_running)
        metrics.num_requests_waiting.set_function(lambda: self._load.num_waiting)
        metrics.queued_prompt_tokens.set_function(lambda: self._load.queued_prompt_tokens)
        metrics.kv_blocks.set_function(lambda: self._load.total_blocks)
        metrics.kv_blocks_free.set_function(lambda: self._load.free_blocks)
        metrics.kv_cache_usage.set_function(lambda: _used_share(self._load))
        metrics.kv_blocks_held.set_function(lambda: _held_blocks(self._load))
        metrics.kv_blocks_reserved.set_function(lambda: self._load.reserved_blocks)
        metrics.kv_blocks_waiting.set_function(lambda: self._load.waiting_blocks)
        metrics.read(
            CounterSource(
                name="num_preemptions",
                text="Sequences preempted for lack of blocks, to be recomputed",
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

    def _expose_rates(self) -> None:
        self._metrics.read_gauges(
            GaugeSource(
                name="prefill_tokens_per_second",
                text="Prompt tokens computed per second of the steps that compute them, over the latest steps",
                value=lambda: None if self._pace is None else self._pace.prefill_tokens_per_s(),
            ),
            GaugeSource(
                name="prefill_backlog_seconds",
                text="Time that the queued prompt tokens will take at the measured rate",
                value=lambda: prefill_backlog_s(self._load, self._pace, self.itl_budget_s),
            ),
        )

    @property
    def load(self) -> Load:
        """The load as last reported."""
        return self._load

    @property
    def pace(self) -> Pace | None:
        """Speed of the latest steps; None until one has computed prompt tokens."""
        return self._pace

    def set_load(self, load: Load) -> None:
        """Replaces the load."""
        had_prompts = self._load.queued_prompt_tokens > 0
        self._load = load
        if had_prompts and not load.queued_prompt_tokens:
            self.on_queue_empty()

    def observe(self, output: StepOutput) -> None:
        """Takes in one step's report."""
        metrics, durations, events = self._metrics, output.durations, output.events
        self.set_load(output.load)
        self.last_step_s = durations.total_s
        self.longest_step_s = max(self.longest_step_s, durations.total_s)
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
            num_tokens = sum(len(choice.token_ids) for new in events.tokens for choice in new.choices)
            metrics.generation_tokens.inc(num_tokens)
        if events.failures:
            faults = [each.fault for each in events.failures]
            metrics.unprepared_requests.inc(faults.count(Fault.PREPARATION))
            metrics.sampling_failures.inc(faults.count(Fault.LOGITS))
        if events.cache.added or events.cache.removed:
            self.on_cache_events(events.cache.added, events.cache.removed)


def prefill_backlog_s(load: Load, pace: Pace | None, itl_budget_s: float | None) -> float | None:
    """Seconds that the queued prompt tokens will take: 0 without any, None while no rate has been measured.

    A tier that decodes computes them within `itl_budget_s`, beside its sequences.
    """
    if not load.queued_prompt_tokens:
        return 0.0
    return None if pace is None else load.queued_prompt_tokens / pace.prefill_tokens_per_s(itl_budget_s)


def _held_blocks(load: Load) -> int:
    return load.total_blocks - load.free_blocks - load.reserved_blocks


def _used_share(load: Load) -> float:
    return 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
