"""Turns settings into a workload: the requests and their send times. Reads the files of datasets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.cli.bench.arrivals import ramp, steady
from pdserve.cli.bench.config import SHARED_PREFIX, SHAREGPT, TRACE, ServeConfig
from pdserve.cli.bench.dataset_files import (
    MAX_INPUT_TOKENS,
    MIN_TOKENS,
    read_sharegpt,
    read_trace,
    sharegpt_requests,
    trace_arrivals_s,
    trace_requests,
)
from pdserve.cli.bench.datasets import RandomLengths, Seed, SharedPrefixLengths, random_requests, shared_prefix_requests
from pdserve.cli.bench.vocabulary import Vocabulary
from pdserve.cli.bench.workload import BenchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and their send times in seconds after the start; `warmups` are sent before and not counted."""

    requests: list[BenchRequest]
    arrivals_s: list[float]
    warmups: list[BenchRequest]
    #: What the user has to know of the requests; empty: they are as ordered.
    note: str = ""


def plan(config: ServeConfig, vocabulary: Vocabulary, *, rate: float, run: int = 0) -> Workload:
    """The workload of run number `run` of a sweep. Raises `SetupError` when its file cannot be used.

    Runs and warm-ups have different seeds, so that none finds another's synthetic prefixes in a cache.
    """
    seed = f"{config.seed}:{run}" if run else config.seed
    requests = build_requests(config, vocabulary, config.num_prompts, seed)
    if not requests:
        raise SetupError(
            f"{config.dataset_path} has no conversation of a suitable length, "
            f"which is {MIN_TOKENS} to {MAX_INPUT_TOKENS} prompt tokens."
        )
    requests, note = _as_many(config, requests)
    warmups = build_requests(config, vocabulary, config.num_warmups, f"{seed}:warm-up")
    arrivals_s = _arrivals_s(config, len(requests), rate)
    return Workload(requests=requests, arrivals_s=arrivals_s, warmups=warmups, note=note)


def _as_many(config: ServeConfig, requests: list[BenchRequest]) -> tuple[list[BenchRequest], str]:
    """As many requests as ordered, where the file has fewer conversations, and what is said of it.

    Those of a trace have times, and are sent once.
    """
    count = config.num_prompts
    if len(requests) == count:
        return requests, ""
    has = f"{config.dataset_path} has only {len(requests)} usable requests, and {count} were ordered"
    if config.dataset_name == TRACE:
        return requests, f"{has}: {len(requests)} are sent."
    again = f"{has}: they are sent several times, and the later ones find the earlier ones' prefixes in the cache."
    return [*islice(cycle(requests), count)], again


def build_requests(config: ServeConfig, vocabulary: Vocabulary, count: int, seed: Seed) -> list[BenchRequest]:
    """Up to `count` requests of the configured dataset."""
    if count == 0:
        return []
    if config.dataset_name == SHAREGPT:
        return sharegpt_requests(
            read_sharegpt(_dataset_path(config)),
            count,
            count_tokens=vocabulary.count_tokens,
            output_len=config.sharegpt_output_len,
            seed=seed,
        )
    if config.dataset_name == TRACE:
        return trace_requests(
            vocabulary.pool,
            read_trace(_dataset_path(config), count),
            tokens_per_hash=config.timed_trace_chunk_hash_size,
            seed=seed,
        )
    if config.dataset_name == SHARED_PREFIX:
        shared = SharedPrefixLengths(
            num_prefixes=config.prefix_repetition_num_prefixes,
            prefix_len=config.prefix_repetition_prefix_len,
            suffix_len=config.prefix_repetition_suffix_len,
            output_len=config.prefix_repetition_output_len,
        )
        return shared_prefix_requests(vocabulary.pool, count, shared, seed=seed)
    lengths = RandomLengths(
        input_len=config.random_input_len,
        output_len=config.random_output_len,
        range_ratio=config.random_range_ratio,
        prefix_len=config.random_prefix_len,
    )
    return random_requests(vocabulary.pool, count, lengths, seed=seed)


def _arrivals_s(config: ServeConfig, count: int, rate: float) -> list[float]:
    start, end = config.ramp_up_start_rps, config.ramp_up_end_rps
    if config.ramp_up_strategy is not None and start is not None and end is not None:
        return ramp(count, start, end, strategy=config.ramp_up_strategy, burstiness=config.burstiness, seed=config.seed)
    if config.dataset_name == TRACE and math.isinf(rate):
        return trace_arrivals_s(read_trace(_dataset_path(config), count), config.timed_trace_sec_multiplier)
    return steady(count, rate, burstiness=config.burstiness, seed=config.seed)


def _dataset_path(config: ServeConfig) -> Path:
    assert config.dataset_path is not None, "the settings have been validated"
    return Path(config.dataset_path)
