"""Processor time by which sampling takes longer when a step's rows have JSON schemas, in one process with one thread.

    python -m benchmarks.structured_steps [--rows 1 16] [--steps 128] [--rounds 9] [--out benchmarks/results]

A round samples the same number of steps with free rows and with rows that each have a schema of their own, for a list
of texts, in either order. Logits are normal numbers times 3, other ones in each step. A machine that others use, too,
changes processor time less than time that passes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import environment
from benchmarks.result_files import write_results
from benchmarks.sampling import SCALE, SEED, cpu_sampler
from kernels.choice import instruction_sets
from pdserve.base.sampling import SamplingParams
from pdserve.engine.cpu_sampler import CpuSampler
from pdserve.engine.sequence import Sampled, SampleRow
from pdserve.model.grammar import GrammarVocabulary
from pdserve.model.resolve import resolve_model
from pdserve.model.tokenizer_file import read_tokenizer
from router_svc.api.json_grammars import Whitespace, json_grammar
from tests.support.cluster import MODEL

VOCABULARY = 49_152
PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round of one kind: the median of its steps, and all of them together, in microseconds a step."""

    round: int
    rows: int
    has_schema: bool
    median_us: float
    mean_us: float


def _row(number: int, vocabulary: GrammarVocabulary | None) -> SampleRow:
    grammar = ""
    if vocabulary is not None:
        name, texts = f"text_{number}", {"type": "array", "items": {"type": "string"}, "minItems": 64}
        schema = {"type": "object", "properties": {name: texts}, "required": [name], "additionalProperties": False}
        grammar = json_grammar(schema, Whitespace(), closes_objects=False, param="schema")
    return SampleRow(
        params=SamplingParams(seed=number, grammar=grammar),
        choice_index=0,
        tokens=array("q", range(PROMPT_TOKENS)),
        num_prompt=PROMPT_TOKENS,
        grammar=None if vocabulary is None else vocabulary.compile(grammar).start(),
    )


def _step_times(sampler: CpuSampler, logits: Sequence[Tensor], rows: Sequence[SampleRow]) -> list[float]:
    times = []
    for step in logits:
        started_at = time.process_time()
        results = sampler.sample(step, rows, range(len(rows)))
        times.append(1e6 * (time.process_time() - started_at))
        for row, result in zip(rows, results, strict=True):
            assert isinstance(result, Sampled), result
            row.tokens.append(result.token_id)
    return times


def measured(rows: Sequence[int], steps: int, rounds: int) -> list[Sample]:
    """All samples, in the order in which they were taken."""
    sampler = cpu_sampler(instruction_sets()[0], 1)
    vocabulary = GrammarVocabulary(read_tokenizer(resolve_model(MODEL).path, encodes=False), VOCABULARY)
    generator = torch.Generator().manual_seed(SEED)
    pool = [torch.randn(max(rows), VOCABULARY, generator=generator) * SCALE for _ in range(8)]
    samples: list[Sample] = []
    for number in range(-1, rounds):  # The first one is a warm-up.
        for count in rows:
            logits = [pool[step % len(pool)][:count] for step in range(steps)]
            for has_schema in (False, True) if number % 2 else (True, False):
                made = [_row(number * count + index, vocabulary if has_schema else None) for index in range(count)]
                times = _step_times(sampler, logits, made)
                median, mean = statistics.median(times), statistics.fmean(times)
                samples.append(Sample(round=number, rows=count, has_schema=has_schema, median_us=median, mean_us=mean))
    return [each for each in samples if each.round >= 0]


def report(samples: Sequence[Sample]) -> str:
    """A Markdown table."""
    lines = [
        "| rows | µs a step, free | with schemas | longer by, median of rounds | of each row | least |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for rows in dict.fromkeys(each.rows for each in samples):
        free, held = (
            [each.median_us for each in samples if (each.rows, each.has_schema) == (rows, kind)]
            for kind in (False, True)
        )
        longer = [ours - theirs for ours, theirs in zip(held, free, strict=True)]
        middle = statistics.median(longer)
        lines.append(
            f"| {rows} | {statistics.median(free):.0f} | {statistics.median(held):.0f} | {middle:.0f} | "
            f"{middle / rows:.1f} | {min(held) - min(free):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the table, and writes it with the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samples = measured(arguments.rows, arguments.steps, arguments.rounds)
    table = report(samples)
    print(table)
    if arguments.out is not None:
        about = environment.describe()
        raw = {"environment": about, "settings": {**vars(arguments), "out": None}}
        raw |= {"samples": [asdict(each) for each in samples]}
        name = f"structured-steps-{about['date']}"
        write_results(arguments.out, name, raw, f"# Steps\n\n{environment.heading(about, 'Times')}{table}\n")


if __name__ == "__main__":
    main()
