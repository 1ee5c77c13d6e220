"""Whether traces are recorded: flags first, then OpenTelemetry's variables."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from pdserve.base.errors import SetupError
from pdserve.observe.tracing.setup import TracingSettings, make_tracer, tracing_settings
from pdserve.observe.tracing.spans import Sampler

FLAG = "http://collector:4318"


@dataclass(frozen=True)
class Flags:
    otlp_endpoint: str | None = None
    trace_sample_ratio: float | None = None


def settings(flags: Flags = Flags(), **variables: str) -> TracingSettings | None:
    return tracing_settings(flags, "pdserve-router", variables.get)


def found(flags: Flags = Flags(), **variables: str) -> TracingSettings:
    result = settings(flags, **variables)
    assert result is not None
    return result


def test_nothing_is_recorded_without_an_endpoint() -> None:
    assert settings() is None
    assert settings(OTEL_SERVICE_NAME="a", OTEL_TRACES_SAMPLER="always_on") is None


@pytest.mark.parametrize(
    ("flag", "variables", "url"),
    [
        (FLAG, {}, f"{FLAG}/v1/traces"),
        (f"{FLAG}/v1/traces", {}, f"{FLAG}/v1/traces"),
        (FLAG, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other", "OTEL_SDK_DISABLED": "true"}, f"{FLAG}/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://other/base/"}, "https://other/base/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://exact/in"}, "http://exact/in"),
    ],
)
def test_the_url_is_the_flags_else_the_variables(flag: str | None, variables: dict[str, str], url: str) -> None:
    assert found(Flags(otlp_endpoint=flag), **variables).url == url


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_the_variables_can_switch_traces_off(off: dict[str, str]) -> None:
    assert settings(OTEL_EXPORTER_OTLP_ENDPOINT="http://other", **off) is None


def test_name_and_conventions_come_from_the_variables() -> None:
    plain = found(Flags(otlp_endpoint=FLAG))
    assert (plain.service_name, plain.gen_ai) == ("pdserve-router", False)
    named = found(
        Flags(otlp_endpoint=FLAG),
        OTEL_SERVICE_NAME="mine",
        OTEL_SEMCONV_STABILITY_OPT_IN="http, gen_ai_latest_experimental",
    )
    assert (named.service_name, named.gen_ai) == ("mine", True)


@pytest.mark.parametrize(
    ("ratio", "variables", "sampler"),
    [
        (None, {}, Sampler()),
        (0.05, {"OTEL_TRACES_SAMPLER": "always_off"}, Sampler(ratio=0.05)),
        (None, {"OTEL_TRACES_SAMPLER": "always_off"}, Sampler(ratio=0, parent_based=False)),
        (None, {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, Sampler(ratio=0)),
        (
            None,
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            Sampler(ratio=0.25),
        ),
        (None, {"OTEL_TRACES_SAMPLER": "traceidratio"}, Sampler(ratio=1, parent_based=False)),
    ],
)
def test_the_sampler_is_the_flags_else_the_variables(
    ratio: float | None, variables: dict[str, str], sampler: Sampler
) -> None:
    assert found(Flags(otlp_endpoint=FLAG, trace_sample_ratio=ratio), **variables).sampler == sampler


@pytest.mark.parametrize(
    ("flags", "variables", "names"),
    [
        (Flags(otlp_endpoint="collector:4317"), {}, "collector:4317"),
        (Flags(otlp_endpoint=FLAG, trace_sample_ratio=1.5), {}, "--trace-sample-ratio is 1.5"),
        (Flags(otlp_endpoint=FLAG), {"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "jaeger_remote"),
        (
            Flags(otlp_endpoint=FLAG),
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "some"},
            "OTEL_TRACES_SAMPLER_ARG is some",
        ),
        (Flags(otlp_endpoint=FLAG), {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "'grpc'"),
    ],
)
def test_what_cannot_be_followed_is_an_error_that_names_it(flags: Flags, variables: dict[str, str], names: str) -> None:
    with pytest.raises(SetupError, match=names):
        settings(flags, **variables)


def test_without_the_extra_the_flag_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pdserve.observe.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SetupError, match="extra otel"):
        make_tracer(Flags(otlp_endpoint=FLAG), "pdserve-router", "r0")


def test_without_the_extra_a_variable_is_only_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "pdserve.observe.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", FLAG)
    assert make_tracer(Flags(), "pdserve-router", "r0") is None
    assert [record.message for record in caplog.records] == ["tracing_off"]


@pytest.mark.parametrize("module", ["router_svc.service", "pdserve.cli.up"])
def test_no_tracing_of_opentelemetry_is_imported_before_it_is_switched_on(module: str) -> None:
    # The client of Redis imports the API for metrics where it is installed; that is no choice of ours.
    ours = ("pdserve.observe.tracing.otlp", "opentelemetry.exporter", "opentelemetry.sdk.trace")
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith({ours!r})])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
