"""Settings of `pdserve bench serve`. Names and meanings follow `vllm bench serve` where they are the same."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.base.config import option
from pdserve.base.errors import SetupError
from pdserve.cli.bench.arrivals import EXPONENTIAL, LINEAR
from pdserve.cli.bench.metrics import DEFAULT_PERCENTILES, GOODPUT_METRICS, METRICS
from pdserve.cli.bench.workload import COMPLETIONS
from pdserve.cli.router_client import normal_base_url

RANDOM, SHARED_PREFIX, SHAREGPT, TRACE = DATASETS = ("random", "shared-prefix", "sharegpt", "trace")
ALL_AT_ONCE = (math.inf,)


def parse_rates(text: str) -> tuple[float, ...]:
    """Requests a second: `inf`, `2.5`, or several such as `1,2,4`."""
    rates = _numbers(text)
    if not rates or min(rates) <= 0:
        raise ValueError(f"{text!r} is not a rate above 0, `inf`, or several such as 1,2,4")
    return rates


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Percentiles such as `50,90,99.9`, ascending."""
    percentiles = _numbers(text)
    if not percentiles or not all(0 <= percent <= 100 for percent in percentiles):
        raise ValueError(f"{text!r} is not a list of percentiles such as 50,90,99")
    return tuple(sorted(set(percentiles)))


def parse_metrics(text: str) -> tuple[str, ...]:
    """Names of latencies such as `ttft,tpot`, in the order they are reported."""
    names = {name.strip() for name in text.split(",")}
    if unknown := names - set(METRICS):
        raise ValueError(f"{', '.join(sorted(unknown))} is none of {', '.join(METRICS)}")
    return tuple(metric for metric in METRICS if metric in names)


def parse_goodput(text: str) -> dict[str, float]:
    """Promises such as `ttft:500 tpot:50`, in milliseconds by metric."""
    promises = {}
    for part in text.replace(",", " ").split():
        metric, _, bound = part.partition(":")
        if metric not in GOODPUT_METRICS:
            raise ValueError(f"{part!r} does not begin with one of {', '.join(GOODPUT_METRICS)}")
        promises[metric] = _number(bound)
    return promises


def parse_object(text: str) -> dict[str, object]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.replace(",", " ").split())


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if math.isnan(number):
        raise ValueError(f"{text!r} is not a number")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What `pdserve bench serve` needs to know."""

    base_url: str | None = option(None, help="address of the server; instead of --host and --port", metavar="URL")
    host: str = option("127.0.0.1", help="host of the server", metavar="ADDRESS")
    port: int = option(8000, help="port of the server", minimum=1)
    endpoint: str = option(COMPLETIONS, help="path that is asked; /v1/chat/completions is the other", metavar="PATH")
    model: str | None = option(None, help="model to ask; the server's first when absent", metavar="NAME")
    tokenizer: str | None = option(
        None, help="directory with the model's tokenizer.json; the server's /tokenize when absent", metavar="DIR"
    )
    header: Mapping[str, str] | None = option(
        None, help="headers of every request, such as an API key, as a JSON object", metavar="JSON", parse=parse_object
    )
    extra_body: Mapping[str, object] | None = option(
        None, help="fields added to every request, as a JSON object", metavar="JSON", parse=parse_object
    )

    dataset_name: str = option(RANDOM, help="where requests come from", choices=DATASETS)
    num_prompts: int = option(1000, help="requests to send; of a trace, the first so many", metavar="N", minimum=1)
    random_input_len: int = option(1024, help="random: prompt tokens after the prefix", minimum=1)
    random_output_len: int = option(128, help="random: tokens to generate", minimum=1)
    random_range_ratio: float = option(
        0.0, help="random: lengths vary evenly by this share up and down, 0 to 1", minimum=0
    )
    random_prefix_len: int = option(0, help="random: tokens that begin all prompts alike", minimum=0)
    prefix_repetition_num_prefixes: int = option(10, help="shared-prefix: how many prefixes", metavar="N", minimum=1)
    prefix_repetition_prefix_len: int = option(256, help="shared-prefix: tokens of a prefix", minimum=1)
    prefix_repetition_suffix_len: int = option(256, help="shared-prefix: prompt tokens after it", minimum=1)
    prefix_repetition_output_len: int = option(128, help="shared-prefix: tokens to generate", minimum=1)

    request_rate: tuple[float, ...] = option(
        ALL_AT_ONCE,
        help="requests a second on average; inf sends all at once; several, such as 1,2,4, are run one after another",
        parse=parse_rates,
        several=True,
    )
    burstiness: float = option(
        1.0, help="shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts, more is more even"
    )
    max_concurrency: int | None = option(None, help="requests under way at once; no limit when absent", minimum=1)
    ramp_up_strategy: str | None = option(
        None, help="how the rate goes from start to end over the requests", choices=(LINEAR, EXPONENTIAL)
    )
    ramp_up_start_rps: float | None = option(None, help="requests a second at the start of the ramp")
    ramp_up_end_rps: float | None = option(None, help="requests a second at its end")
    num_warmups: int = option(0, help="requests sent before, one after another, and not counted", minimum=0)

    temperature: float = option(0.0, help="sampling temperature; 0 is greedy", minimum=0)
    ignore_eos: bool = option(False, help="generate all tokens, past the model's end of text")
    seed: int = option(0, help="the same seed gives the same requests at the same times", metavar="N")

    goodput: Mapping[str, float] | None = option(
        None,
        help="count requests that keep these promises in milliseconds, such as ttft:500 tpot:50 e2el:5000",
        metavar="METRIC:MS",
        parse=parse_goodput,
        several=True,
    )
    percentile_metrics: tuple[str, ...] = option(METRICS, help="latencies to report", parse=parse_metrics)
    metric_percentiles: tuple[float, ...] = option(
        DEFAULT_PERCENTILES, help="percentiles to report", parse=parse_percentiles
    )
    save_result: bool = option(False, help="write the result as JSON")
    save_detailed: bool = option(False, help="with every request's times, text and error in it")
    result_dir: str = option(".", help="directory the result goes to", metavar="DIR")
    result_filename: str | None = option(
        None, help="name of the result's file; made of rate, model and time when absent", metavar="FILE"
    )

    def __post_init__(self) -> None:
        if self.burstiness <= 0:
            raise SetupError(f"--burstiness: {self.burstiness:g} is not above 0.")
        if self.random_range_ratio > 1:
            raise SetupError(f"--random-range-ratio: {self.random_range_ratio:g} is more than 1.")
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
            raise SetupError("--request-rate and --ramp-up-strategy exclude each other: the ramp says the rate.")

    @property
    def server_url(self) -> str:
        """The server's address."""
        return normal_base_url(self.base_url or f"http://{self.host}:{self.port}")

    @property
    def request_fields(self) -> dict[str, object]:
        """What every request says besides its prompt and length."""
        fields: dict[str, object] = {"temperature": self.temperature}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return fields | dict(self.extra_body or {})
