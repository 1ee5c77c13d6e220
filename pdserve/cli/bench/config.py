"""Settings of `pdserve bench serve`. Names and meanings follow `vllm bench serve` where they are the same."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.base.api_key import bearer
from pdserve.base.config import option, words_option
from pdserve.base.errors import SetupError
from pdserve.cli.bench.arrivals import EXPONENTIAL, LINEAR
from pdserve.cli.bench.metrics import DEFAULT_PERCENTILES, GOODPUT_METRICS, METRICS
from pdserve.cli.bench.workload import COMPLETIONS
from pdserve.cli.router_client import normal_base_url

RANDOM, SHARED_PREFIX, SHAREGPT, TRACE = DATASETS = ("random", "shared-prefix", "sharegpt", "trace")
ALL_AT_ONCE = (math.inf,)


def parse_numbers(text: str) -> tuple[float, ...]:
    """Parses numbers such as `1,2,4` or `1 2 inf`."""
    return tuple(_number(word) for word in _words(text))


def parse_metrics(text: str) -> tuple[str, ...]:
    """Parses names of latencies such as `ttft,tpot`; returns them in the order of the report."""
    names = set(_words(text))
    if unknown := names - set(METRICS):
        raise ValueError(f"{', '.join(sorted(unknown))} is not one of {', '.join(METRICS)}")
    return tuple(metric for metric in METRICS if metric in names)


def parse_goodput(text: str) -> dict[str, float]:
    """Parses objectives such as `ttft:500 tpot:50`, in milliseconds by metric."""
    return {metric: _number(bound) for metric, _, bound in (word.partition(":") for word in _words(text))}


def parse_object(text: str) -> dict[str, object]:
    """Parses a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of `pdserve bench serve`."""

    base_url: str | None = option(None, help="address of the server; instead of --host and --port", metavar="URL")
    host: str = option("127.0.0.1", help="host of the server", metavar="ADDRESS")
    port: int = option(8000, help="port of the server", minimum=1)
    endpoint: str = option(COMPLETIONS, help="path of the requests; /v1/chat/completions for chats", metavar="PATH")
    model: str | None = option(None, help="name of the model; default: the server's first", metavar="NAME")
    tokenizer: str | None = option(
        None, help="directory with the model's tokenizer.json; default: use the server's /tokenize", metavar="DIR"
    )
    api_key: str | None = option(None, help="API key; default: the variable PDSERVE_API_KEY", metavar="KEY")
    header: Mapping[str, str] | None = option(
        None, help="headers of every request, such as an API key, as a JSON object", metavar="JSON", parse=parse_object
    )
    extra_body: Mapping[str, object] | None = option(
        None, help="fields added to every request, as a JSON object", metavar="JSON", parse=parse_object
    )

    dataset_name: str = option(RANDOM, help="source of the requests", choices=DATASETS)
    dataset_path: str | None = option(None, help="file of sharegpt or trace", metavar="FILE")
    num_prompts: int = option(1000, help="number of requests; a file may have fewer", metavar="N", minimum=1)
    random_input_len: int = option(1024, help="random: prompt tokens after the prefix", minimum=1)
    random_output_len: int = option(128, help="random: tokens to generate", minimum=1)
    random_range_ratio: float = option(
        0.0, help="random: relative range of the lengths, uniform around their mean, 0 to 1", minimum=0
    )
    random_prefix_len: int = option(0, help="random: tokens of a prefix that all prompts share", minimum=0)
    prefix_repetition_num_prefixes: int = option(10, help="shared-prefix: number of prefixes", metavar="N", minimum=1)
    prefix_repetition_prefix_len: int = option(256, help="shared-prefix: tokens per prefix", minimum=1)
    prefix_repetition_suffix_len: int = option(256, help="shared-prefix: prompt tokens after the prefix", minimum=1)
    prefix_repetition_output_len: int = option(128, help="shared-prefix: tokens to generate", minimum=1)
    sharegpt_output_len: int | None = option(
        None, help="sharegpt: tokens to generate; default: the length of the answer in the file", minimum=1
    )
    timed_trace_chunk_hash_size: int = option(16, help="trace: prompt tokens per hash id", minimum=1)
    timed_trace_sec_multiplier: float = option(
        0.001, help="trace: seconds per unit of its timestamps; higher is slower", minimum=0
    )

    request_rate: tuple[float, ...] = words_option(
        ALL_AT_ONCE,
        help="mean requests per second; inf sends all at once, or a trace at its timestamps; several rates, such as "
        "1 2 4, run one after another",
        parse=parse_numbers,
    )
    burstiness: float = option(
        1.0, help="shape of the gamma distribution of gaps: 1 is Poisson, lower is burstier, higher is more even"
    )
    max_concurrency: int | None = option(None, help="maximum concurrent requests; default: no limit", minimum=1)
    ramp_up_strategy: str | None = option(
        None, help="change of the rate from start to end over the requests", choices=(LINEAR, EXPONENTIAL)
    )
    ramp_up_start_rps: float | None = option(None, help="requests per second at the start of the ramp")
    ramp_up_end_rps: float | None = option(None, help="requests per second at the end of the ramp")
    num_warmups: int = option(0, help="requests sent before the run, one after another, and not counted", minimum=0)

    temperature: float = option(0.0, help="sampling temperature; 0 is greedy", minimum=0)
    ignore_eos: bool = option(False, help="generate all tokens, even after the model's end of text")
    seed: int = option(0, help="the same seed gives the same requests at the same times", metavar="N")

    goodput: Mapping[str, float] | None = words_option(
        None,
        help="count requests that meet these objectives in milliseconds, such as ttft:500 tpot:50 e2el:5000",
        metavar="METRIC:MS",
        parse=parse_goodput,
    )
    percentile_metrics: tuple[str, ...] = option(METRICS, help="latencies to report", parse=parse_metrics)
    metric_percentiles: tuple[float, ...] = option(
        DEFAULT_PERCENTILES, help="percentiles to report", parse=parse_numbers
    )
    save_result: bool = option(False, help="write the result as JSON")
    save_detailed: bool = option(False, help="include every request's times, text and error in the result")
    result_dir: str = option(".", help="directory of the result", metavar="DIR")
    result_filename: str | None = option(
        None, help="name of the result file; default: made of rate, model and time", metavar="FILE"
    )
    plot: str | None = option(None, help="file for a picture of latency over several rates", metavar="FILE.png")

    def __post_init__(self) -> None:
        if self.burstiness <= 0:
            raise SetupError(f"--burstiness is {self.burstiness:g}, but must be above 0.")
        if self.random_range_ratio > 1:
            raise SetupError(f"--random-range-ratio is {self.random_range_ratio:g}, but must be at most 1.")
        if not self.request_rate or not all(rate > 0 for rate in self.request_rate):
            raise SetupError("--request-rate: every rate must be above 0.")
        if not all(0 <= percent <= 100 for percent in self.metric_percentiles):
            raise SetupError("--metric-percentiles: every percentile must be from 0 to 100.")
        if unknown := set(self.goodput or ()) - set(GOODPUT_METRICS):
            raise SetupError(f"--goodput: {', '.join(sorted(unknown))} is not one of {', '.join(GOODPUT_METRICS)}.")
        if (self.dataset_name in (SHAREGPT, TRACE)) != (self.dataset_path is not None):
            raise SetupError("--dataset-path must be given for the datasets sharegpt and trace, and only for these.")
        if self.save_detailed and not self.save_result:
            raise SetupError("--save-detailed needs --save-result, whose file it extends.")
        if self.plot is not None and (len(self.request_rate) < 2 or math.inf in self.request_rate):
            raise SetupError("--plot needs several finite rates, such as --request-rate 1 2 4.")
        self._check_ramp()

    def _check_ramp(self) -> None:
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if any(end is not None for end in ends):
                raise SetupError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
            return
        if not all(end is not None and end > 0 for end in ends):
            raise SetupError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0.")
        if self.request_rate != ALL_AT_ONCE:
            raise SetupError("--request-rate and --ramp-up-strategy exclude each other: the ramp sets the rate.")

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of every request."""
        return {**bearer(self.api_key), **(self.header or {})}

    @property
    def server_url(self) -> str:
        """Base URL of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return normal_base_url(self.base_url or f"http://{host}:{self.port}")

    @property
    def request_fields(self) -> dict[str, object]:
        """Fields of every request apart from its prompt and length."""
        fields: dict[str, object] = {"temperature": self.temperature}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return fields | dict(self.extra_body or {})
