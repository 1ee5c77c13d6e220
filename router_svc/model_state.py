"""What a router reports of its models: readiness and faults in its probes, load and workers in its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdserve.net.admin import Health
from pdserve.observe.metrics import GaugeSource
from router_svc.api.models import ModelBackend, Models
from router_svc.config import RouterConfig
from router_svc.routing.backlog import prefill_backlog_s
from router_svc.routing.cluster import TIERS
from router_svc.supervisor import NO_DECODE_WORKER

UNPAIRED = "no prefill worker has the KV layout of {}; they prefill by themselves"
NO_PREFILL_WORKER = "no prefill worker is ready; decode workers prefill"


class WatchedModels:
    """Brings probes and metrics up to date with the workers of all models."""

    def __init__(self, models: Models, health: Health, config: RouterConfig) -> None:
        self._models = models
        self._expects_prefill = config.prefill_expected > 0
        self._model, self._prefill = health.watch("model"), health.watch("prefill")
        self._layout, self._transport = health.watch("layout"), health.watch("transport")

    def update(self) -> bool:
        """Returns whether any model has a decode worker that is ready: the others' requests are refused one by one."""
        for backend in self._models:
            backend.gate.set_capacity(backend.cluster.decode_capacity)
            for tier in TIERS:
                backend.metrics.set_workers(tier, len(backend.cluster.ready(tier)))
        is_ready = any(backend.cluster.ready("decode") for backend in self._models)
        self._model(self._each(_missing_decode) if is_ready else None)
        self._prefill(self._each(_missing_prefill) if self._expects_prefill else None)
        self._layout(self._each(_unpaired))
        self._transport(next(self._slow_paths(), None))
        return is_ready

    def _each(self, fault: Callable[[ModelBackend], str | None]) -> str | None:
        """The fault of all models that have it, which are named if there are several; None: no model has it."""
        found = [(backend.name, text) for backend in self._models if (text := fault(backend)) is not None]
        if len(self._models) > 1:
            return "; ".join(f"{name}: {text}" for name, text in found) or None
        return found[0][1] if found else None

    def _slow_paths(self) -> Iterator[str]:
        return (path for backend in self._models if (path := backend.cluster.slow_path) is not None)


def _missing_decode(backend: ModelBackend) -> str | None:
    return None if backend.cluster.ready("decode") else NO_DECODE_WORKER


def _missing_prefill(backend: ModelBackend) -> str | None:
    return None if backend.cluster.ready("prefill") else NO_PREFILL_WORKER


def _unpaired(backend: ModelBackend) -> str | None:
    unpaired = backend.cluster.unpaired_decode
    return UNPAIRED.format(", ".join(unpaired)) if unpaired else None


def export_load(backend: ModelBackend) -> None:
    """Exports what other objects know of the requests for a model."""
    metrics, gate, cluster = backend.metrics, backend.gate, backend.cluster
    metrics.num_requests_running.set_function(lambda: gate.num_admitted)
    metrics.num_requests_waiting.set_function(lambda: gate.num_waiting)
    metrics.queued_uncached_tokens.set_function(lambda: gate.uncached_tokens)
    metrics.read_gauges(
        GaugeSource(
            name="prefill_backlog_seconds",
            text="Time that one worker of the prefill tier would need for the prompts in the admission queue",
            value=lambda: prefill_backlog_s(gate.uncached_tokens, cluster.ready("prefill") or cluster.ready("decode")),
        )
    )
