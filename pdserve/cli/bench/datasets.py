"""Synthetic workloads. Pure: the same seed gives the same requests.

A prompt is sampled as units of a pool, numbered from 0. Units are token ids if the server's tokenizer is known, so that
lengths are exact, else words, most of which are one token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.cli.bench.workload import BenchRequest, Prompt

Seed = int | str


class Pool(Protocol):
    """Units of which synthetic prompts consist."""

    @property
    def size(self) -> int:
        """Number of units."""

    def prompt(self, units: Sequence[int]) -> Prompt:
        """The prompt made of the units with these numbers."""


@dataclass(frozen=True, slots=True)
class TokenPool:
    """Units are token ids, which should not include special tokens."""

    token_ids: Sequence[int]

    @property
    def size(self) -> int:
        """Number of units."""
        return len(self.token_ids)

    def prompt(self, units: Sequence[int]) -> Prompt:
        """The prompt as token ids."""
        return tuple(self.token_ids[unit] for unit in units)


@dataclass(frozen=True, slots=True)
class WordPool:
    """Units are words."""

    words: Sequence[str]

    @property
    def size(self) -> int:
        """Number of units."""
        return len(self.words)

    def prompt(self, units: Sequence[int]) -> Prompt:
        """The prompt as text."""
        return " ".join(self.words[unit] for unit in units)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Lengths of random prompts and outputs, in units and tokens.

    The input after the prefix, and the output, are uniform from `length * (1 - range_ratio)` to
    `length * (1 + range_ratio)`.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    #: Units of a prefix that all prompts share.
    prefix_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixLengths:
    """Number of prefixes, and lengths of prefixes, suffixes and outputs, in units and tokens."""

    num_prefixes: int
    prefix_len: int
    suffix_len: int
    output_len: int


def random_requests(pool: Pool, count: int, lengths: RandomLengths, *, seed: Seed = 0) -> list[BenchRequest]:
    """Prompts that share nothing but their prefix."""
    rng = random.Random(f"random:{seed}")
    prefix = sample_units(rng, pool, lengths.prefix_len)
    requests = []
    for _ in range(count):
        units = sample_units(rng, pool, _length(rng, lengths.input_len, lengths.range_ratio))
        max_tokens = _length(rng, lengths.output_len, lengths.range_ratio)
        requests.append(BenchRequest(prompt=pool.prompt(prefix + units), max_tokens=max_tokens))
    return requests


def shared_prefix_requests(
    pool: Pool, count: int, lengths: SharedPrefixLengths, *, seed: Seed = 0
) -> list[BenchRequest]:
    """Prompts with one of several prefixes, each used equally often in random order, and a suffix of their own."""
    rng = random.Random(f"shared-prefix:{seed}")
    prefixes = [sample_units(rng, pool, lengths.prefix_len) for _ in range(lengths.num_prefixes)]
    order = [index % lengths.num_prefixes for index in range(count)]
    rng.shuffle(order)
    prompts = (pool.prompt(prefixes[index] + sample_units(rng, pool, lengths.suffix_len)) for index in order)
    return [BenchRequest(prompt=prompt, max_tokens=lengths.output_len) for prompt in prompts]


def sample_units(rng: random.Random, pool: Pool, count: int) -> list[int]:
    """Numbers of `count` units sampled from the pool; none if `count` is not above 0."""
    return rng.choices(range(pool.size), k=count)


def _length(rng: random.Random, mean: int, range_ratio: float) -> int:
    spread = int(mean * range_ratio)
    return max(1, rng.randint(mean - spread, mean + spread))
