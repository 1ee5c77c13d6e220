"""Whether and how a process records traces: from its flags, else from OpenTelemetry's own variables.

A flag that cannot be followed keeps the process from starting. A variable, which often comes with the platform and is
meant for others, is only warned about.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from pdserve.base import config as settings
from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.observe.metrics import CounterSource
from pdserve.observe.tracing.export import ExportingTracer
from pdserve.observe.tracing.spans import NO_TRACER, Sampler, Tracer

log = get_logger(__name__)

_TRACES_PATH = "/v1/traces"
_PROTOCOL = "http/protobuf"
_GEN_AI_OPT_IN = "gen_ai_latest_experimental"
#: Values of OTEL_TRACES_SAMPLER. Where the ratio is None, OTEL_TRACES_SAMPLER_ARG has it.
_SAMPLERS: dict[str, tuple[float | None, bool]] = {
    "always_on": (1.0, False),
    "always_off": (0.0, False),
    "traceidratio": (None, False),
    "parentbased_always_on": (1.0, True),
    "parentbased_always_off": (0.0, True),
    "parentbased_traceidratio": (None, True),
}

Read = Callable[[str], str | None]


class TracingConfig(Protocol):
    """The settings of a service that concern traces."""

    @property
    def otlp_endpoint(self) -> str | None:
        """Base URL of the collector; None: OpenTelemetry's variables decide."""

    @property
    def trace_sample_ratio(self) -> float | None:
        """Share of the traces that start here; None: OpenTelemetry's variables decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """How traces are recorded."""

    #: URL that spans are posted to.
    url: str
    service_name: str
    sampler: Sampler
    #: Whether spans carry the attributes of the conventions for generative AI.
    gen_ai: bool


def tracing_settings(config: TracingConfig, service_name: str, read: Read) -> TracingSettings | None:
    """The settings, or None where nothing is recorded. `read` reads a variable. Raises `SetupError`."""
    url = _url(config.otlp_endpoint, read)
    if url is None:
        return None
    protocol = read("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or read("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOL
    if protocol != _PROTOCOL:
        raise SetupError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, but spans are sent by {_PROTOCOL} only. "
            "Name the collector's port for HTTP, usually 4318, and unset the variable."
        )
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise SetupError(
            f"The endpoint for traces is {url!r}, which is no URL of a collector. "
            "Write, for example, --otlp-endpoint http://127.0.0.1:4318."
        )
    opt_in = read("OTEL_SEMCONV_STABILITY_OPT_IN") or ""
    return TracingSettings(
        url=url,
        service_name=read("OTEL_SERVICE_NAME") or service_name,
        sampler=_sampler(config.trace_sample_ratio, read),
        gen_ai=_GEN_AI_OPT_IN in (word.strip() for word in opt_in.split(",")),
    )


def _url(flag: str | None, read: Read) -> str | None:
    base = flag
    if base is None:
        is_disabled = (read("OTEL_SDK_DISABLED") or "").lower() == "true"
        if is_disabled or (read("OTEL_TRACES_EXPORTER") or "otlp") != "otlp":
            return None
        exact = read("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        if exact:
            return exact
        base = read("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not base:
        return None
    base = base.rstrip("/")
    return base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH


def _sampler(ratio: float | None, read: Read) -> Sampler:
    if ratio is not None:
        return Sampler(ratio=_share(ratio, "--trace-sample-ratio"))
    name = read("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    if name not in _SAMPLERS:
        raise SetupError(f"OTEL_TRACES_SAMPLER is {name!r}, but must be one of {', '.join(_SAMPLERS)}.")
    ratio, parent_based = _SAMPLERS[name]
    if ratio is None:
        ratio = _share(read("OTEL_TRACES_SAMPLER_ARG") or "1", "OTEL_TRACES_SAMPLER_ARG")
    return Sampler(ratio=ratio, parent_based=parent_based)


def _share(value: str | float, name: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise SetupError(f"{name} is {value}, but must be a number from 0 (no traces) to 1 (all of them).")
    return share


def make_tracer(config: TracingConfig, service_name: str, instance: str) -> ExportingTracer | None:
    """A tracer for this process, or None. The caller closes it. Raises `SetupError`."""
    try:
        wanted = tracing_settings(config, service_name, settings.variable)
        if wanted is None:
            return None
        try:
            from pdserve.observe.tracing.otlp import OtlpExporter
        except ImportError as error:
            raise SetupError(
                f"Traces need OpenTelemetry, which is not installed ({error.name} is missing). "
                "Install pdserve with the extra otel, or start without --otlp-endpoint."
            ) from error
    except SetupError as error:
        if config.otlp_endpoint is not None:
            raise
        log.warning("tracing_off", reason=error)
        return None
    exporter = OtlpExporter(wanted.url, service_name=wanted.service_name, instance=instance)
    log.info("tracing_on", url=wanted.url, service=wanted.service_name, ratio=wanted.sampler.ratio)
    return ExportingTracer(exporter, wanted.sampler, gen_ai=wanted.gen_ai)


@asynccontextmanager
async def tracing(config: TracingConfig, service_name: str, instance: str | None = None) -> AsyncIterator[Tracer]:
    """The tracer of this process, flushed when the block ends. Raises `SetupError`."""
    tracer = make_tracer(config, service_name, instance or f"{socket.gethostname()}-{os.getpid()}")
    try:
        yield tracer or NO_TRACER
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def span_counters(tracer: Tracer) -> tuple[CounterSource, CounterSource]:
    """The counters of `/metrics`."""
    return (
        CounterSource(name="spans_exported", text="Spans that a collector took", value=lambda: tracer.exported),
        CounterSource(
            name="spans_dropped",
            text="Spans lost: the queue was full, or the collector did not take them",
            value=lambda: tracer.dropped,
        ),
    )
