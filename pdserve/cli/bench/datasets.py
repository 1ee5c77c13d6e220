"""Made-up workloads. Pure: a seed gives the same requests every time.

A prompt is drawn as units of a pool, numbered from 0. Units are token ids where the server's tokenizer is known, so
that lengths are exact, else words, most of which are one token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.cli.bench.workload import BenchRequest, Prompt

Seed = int | str


class Pool(Protocol):
    """What made-up prompts consist of."""

    @property
    def size(self) -> int:
        """How many units there are."""

    def prompt(self, units: Sequence[int]) -> Prompt:
        """The prompt of these units, by their numbers."""


@dataclass(frozen=True, slots=True)
class TokenPool:
    """Units are token ids; no special tokens should be among them."""

    token_ids: Sequence[int]

    @property
    def size(self) -> int:
        """How many units there are."""
        return len(self.token_ids)

    def prompt(self, units: Sequence[int]) -> Prompt:
        """Token ids."""
        return tuple(self.token_ids[unit] for unit in units)


@dataclass(frozen=True, slots=True)
class WordPool:
    """Units are words."""

    words: Sequence[str]

    @property
    def size(self) -> int:
        """How many units there are."""
        return len(self.words)

    def prompt(self, units: Sequence[int]) -> Prompt:
        """Text."""
        return " ".join(self.words[unit] for unit in units)


def random_requests(
    pool: Pool,
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: Seed = 0,
) -> list[BenchRequest]:
    """Prompts that share nothing but their first `prefix_len` units.

    The length of what follows, and of the output, is drawn evenly from `length * (1 - range_ratio)` to
    `length * (1 + range_ratio)`.
    """
    draws = random.Random(f"random:{seed}")
    prefix = draw_units(draws, pool, prefix_len)
    requests = []
    for _ in range(count):
        units = draw_units(draws, pool, _length(draws, input_len, range_ratio))
        max_tokens = _length(draws, output_len, range_ratio)
        requests.append(BenchRequest(prompt=pool.prompt(prefix + units), max_tokens=max_tokens))
    return requests


def shared_prefix_requests(
    pool: Pool,
    count: int,
    *,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    seed: Seed = 0,
) -> list[BenchRequest]:
    """Prompts of one of `num_prefixes` prefixes, used equally often in random order, and a suffix of their own."""
    draws = random.Random(f"shared-prefix:{seed}")
    prefixes = [draw_units(draws, pool, prefix_len) for _ in range(num_prefixes)]
    order = [index % num_prefixes for index in range(count)]
    draws.shuffle(order)
    return [
        BenchRequest(prompt=pool.prompt(prefixes[index] + draw_units(draws, pool, suffix_len)), max_tokens=output_len)
        for index in order
    ]


def draw_units(draws: random.Random, pool: Pool, count: int) -> list[int]:
    """Numbers of `count` units of the pool; none when `count` is not above 0."""
    return draws.choices(range(pool.size), k=count)


def _length(draws: random.Random, middle: int, range_ratio: float) -> int:
    spread = int(middle * range_ratio)
    return max(1, draws.randint(middle - spread, middle + spread))
