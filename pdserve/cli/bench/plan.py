"""From settings to a workload: which requests are sent, and when."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.cli.bench.arrivals import ramp, steady
from pdserve.cli.bench.config import SHARED_PREFIX, ServeConfig
from pdserve.cli.bench.datasets import Pool, Seed, random_requests, shared_prefix_requests
from pdserve.cli.bench.workload import BenchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, and when each is sent, in seconds after the start; `warmups` go before and are not counted."""

    requests: list[BenchRequest]
    arrivals_s: list[float]
    warmups: list[BenchRequest]


def plan(config: ServeConfig, pool: Pool, *, rate: float, run: int = 0) -> Workload:
    """The workload of run number `run` of a sweep.

    Runs and warm-ups have prompts of their own, so that none finds the prefixes of another in a cache.
    """
    requests = build_requests(config, pool, config.num_prompts, _seed(config, run))
    warmups = build_requests(config, pool, config.num_warmups, f"{_seed(config, run)}:warm-up")
    return Workload(requests=requests, arrivals_s=_arrivals_s(config, len(requests), rate), warmups=warmups)


def build_requests(config: ServeConfig, pool: Pool, count: int, seed: Seed) -> list[BenchRequest]:
    """Requests of the dataset that the settings name."""
    if config.dataset_name == SHARED_PREFIX:
        return shared_prefix_requests(
            pool,
            count,
            num_prefixes=config.prefix_repetition_num_prefixes,
            prefix_len=config.prefix_repetition_prefix_len,
            suffix_len=config.prefix_repetition_suffix_len,
            output_len=config.prefix_repetition_output_len,
            seed=seed,
        )
    return random_requests(
        pool,
        count,
        input_len=config.random_input_len,
        output_len=config.random_output_len,
        range_ratio=config.random_range_ratio,
        prefix_len=config.random_prefix_len,
        seed=seed,
    )


def _seed(config: ServeConfig, run: int) -> Seed:
    return f"{config.seed}:{run}" if run else config.seed


def _arrivals_s(config: ServeConfig, count: int, rate: float) -> list[float]:
    start, end = config.ramp_up_start_rps, config.ramp_up_end_rps
    if config.ramp_up_strategy is not None and start is not None and end is not None:
        return ramp(count, start, end, strategy=config.ramp_up_strategy, burstiness=config.burstiness, seed=config.seed)
    return steady(count, rate, burstiness=config.burstiness, seed=config.seed)
