"""What an embedding or a decision costs, compared with requests that generate from the same number of prompt tokens.

    python -m benchmarks.embeddings [--rounds 15] [--out benchmarks/results]

A cluster of `pdserve up` gets one request at a time, each with a prompt of its own, so that nothing is cached. Each
round has every kind of request once, in random order, and is compared with itself: the ratio of a kind's time to that
of a completion of one token, which no decode worker takes part in.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import openai

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from tests.support.cluster import MODEL, running_cluster

LENGTHS = (64, 512, 1536)
#: Words of one token, and the tokens of a decision's prompt behind its input.
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
_QUESTION_TOKENS = 40
_BASE = "completion of 1 token"
Send = Callable[[openai.OpenAI, list[int]], object]


def _completion(tokens: int) -> Send:
    return lambda client, prompt: client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )


def _embedding(pooling: str) -> Send:
    return lambda client, prompt: client.embeddings.create(model=MODEL, input=prompt, extra_body={"pooling": pooling})


def _decision(client: openai.OpenAI, prompt: list[int]) -> object:
    """A question about a text, whose prompt has about as many tokens."""
    text = " ".join(_WORDS[token % len(_WORDS)] for token in prompt[:-_QUESTION_TOKENS])
    question = {"type": "predicate", "instructions": "The text has a verb."}
    return client.decisions.create(model=MODEL, input=text, questions=[question])  # type: ignore[list-item]


KINDS: dict[str, Send] = {
    _BASE: _completion(1),
    "completion of 32 tokens": _completion(32),
    "embedding, last token": _embedding("last"),
    "embedding, mean": _embedding("mean"),
    "decision": _decision,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request."""

    round: int
    prompt_tokens: int
    kind: str
    ms: float


def measured(rounds: int) -> list[Sample]:
    """All samples, in the order in which they were taken."""
    samples: list[Sample] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        running_cluster(Path(directory)) as cluster,
        cluster.client() as client,
    ):
        for number in range(-1, rounds):
            rng = random.Random(number)
            for length in LENGTHS:
                for kind in rng.sample(sorted(KINDS), len(KINDS)):
                    prompt = [rng.randrange(100, 10_000) for _ in range(length)]
                    started_at = time.perf_counter()
                    KINDS[kind](client, prompt)
                    ms = 1000 * (time.perf_counter() - started_at)
                    if number >= 0:  # The first round warms up.
                        samples.append(Sample(round=number, prompt_tokens=length, kind=kind, ms=ms))
    return samples


def report(samples: Sequence[Sample]) -> str:
    """A Markdown table."""
    lines = [
        f"| prompt tokens | request | ms, median | ratio to a {_BASE}, median (p25 to p75) |",
        "| --- | --- | --- | --- |",
    ]
    for length in LENGTHS:
        of = {
            kind: [each.ms for each in samples if (each.prompt_tokens, each.kind) == (length, kind)] for kind in KINDS
        }
        for kind, times in of.items():
            ratios = [ms / base for ms, base in zip(times, of[_BASE], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            shown = "1" if kind == _BASE else f"{middle:.2f} ({low:.2f} to {high:.2f})"
            lines.append(f"| {length} | {kind} | {statistics.median(times):.0f} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the table, and writes it with the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samples = measured(arguments.rounds)
    table = report(samples)
    print(table)
    if arguments.out is not None:
        environment = describe()
        raw = {"environment": environment, "rounds": arguments.rounds, "samples": [asdict(each) for each in samples]}
        write_results(arguments.out, "embeddings", raw, f"# Embeddings\n\n{heading(environment, 'Times')}{table}\n")


if __name__ == "__main__":
    main()
