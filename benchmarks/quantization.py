"""Quality of 8-bit weights or 8-bit KV: perplexity, and agreement of next tokens and greedy completions.

    python -m benchmarks.quantization [weights|kv-cache] [--tokens 20000] [--out benchmarks/results]

Uses the default model. Weights, with the C++ kernels: bfloat16, the same rounded to int8 (`--quantization int8`), and
float32 as a yardstick for the effect of bfloat16. KV cache, in plain torch: bfloat16 weights with KV in bfloat16 and in
float8_e4m3fn (`--kv-cache-dtype fp8_e4m3`), with the scales of the checkpoint.

The text is Python's own reference, which is part of every Python; the result contains its hash. Perplexity is over
windows of 1,024 tokens, 512 apart: each token is scored once, after 512 to 1,023 other tokens, or fewer in the first
window. Results of the C++ kernels do not depend on `--threads`.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics

import torch

from benchmarks.environment import describe
from benchmarks.quantized_models import KV_CACHE, WEIGHTS, WINDOW, Comparison, Model, Pair
from benchmarks.result_files import write_results
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.config import ModelConfig
from pdserve.model.kv_scales import read_kv_scales
from pdserve.model.resolve import DEFAULT_MODEL, resolve_model
from pdserve.model.tokenizer_file import read_tokenizer

STRIDE = 512
COMPLETION_TOKENS = 64
COMPARISONS = {"weights": WEIGHTS, "kv-cache": KV_CACHE}
PROMPTS = (
    "What is the capital of France?",
    "Explain why the sky is blue.",
    "Write a short poem about the sea.",
    "List five things to take on a hike.",
    "How does a bicycle stay upright?",
    "Tell a story about a fox and a lantern.",
    "What is the difference between a list and a tuple in Python?",
    "Write a Python function that reverses a string.",
    "Summarize the water cycle in three sentences.",
    "Who was Marie Curie?",
    "Give me a recipe for pancakes.",
    "Translate 'good morning' into Spanish and German.",
    "What causes earthquakes?",
    "Write an email asking for a day off.",
    "How do vaccines work?",
    "What is 17 times 24? Show the steps.",
    "Describe a sunset to someone who has never seen one.",
    "Why do leaves change color in autumn?",
    "Suggest three names for a bakery.",
    "What is a database index?",
    "Write a haiku about winter.",
    "How can I learn to play the guitar?",
    "What are prime numbers?",
    "Explain gravity to a child.",
)


def reference_text() -> str:
    """The language reference of `help()`, topic by topic."""
    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def windows(num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(start, first scored token, end) of each window; every token but the first is scored once."""
    yield 0, 1, min(WINDOW, num_tokens)
    for end in range(WINDOW + STRIDE, num_tokens + STRIDE, STRIDE):
        yield end - WINDOW, end - STRIDE, min(end, num_tokens)


def score(models: list[Model], pairs: Sequence[Pair], tokens: list[int]) -> tuple[dict[str, object], dict[str, object]]:
    """Perplexity by model; by pair, the share of equal most likely tokens and the mean KL divergence."""
    loss = {model.name: 0.0 for model in models}
    equal = dict.fromkeys(pairs, 0)
    divergence = dict.fromkeys(pairs, 0.0)
    count = 0
    for start, first, end in windows(len(tokens)):
        wanted = range(first - 1 - start, end - 1 - start)
        targets = torch.tensor(tokens[first:end])
        log_probs = {}
        for model in models:
            logits = model.forward([tokens[start:end]], [0], wanted)
            log_probs[model.name] = logits.log_softmax(-1)
            loss[model.name] -= float(log_probs[model.name].gather(1, targets[:, None]).sum(dtype=torch.float64))
        for pair in pairs:
            compared, base = (log_probs[name] for name in pair)
            equal[pair] += int((compared.argmax(-1) == base.argmax(-1)).sum())
            divergence[pair] += float((base.exp() * (base - compared)).sum(-1).sum(dtype=torch.float64))
        count += len(targets)
        print(f"\r{end} of {len(tokens)} tokens", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    perplexity: dict[str, object] = {name: round(math.exp(total / count), 4) for name, total in loss.items()}
    agreement: dict[str, object] = {
        f"{pair[0]} / {pair[1]}": {
            "same_most_likely_token": round(equal[pair] / count, 5),
            "mean_kl_divergence_nats": round(divergence[pair] / count, 6),
        }
        for pair in pairs
    }
    return perplexity, agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of two models' greedy completions over all prompts."""

    #: Share of all tokens that precede the first difference.
    tokens_until_divergence: float
    #: Share of completions that are equal to the end.
    whole_completions: float


def common_prefix(one: list[int], other: list[int]) -> int:
    """Number of equal tokens from the start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def complete_all(models: list[Model], pairs: Sequence[Pair], prompts: list[list[int]]) -> dict[str, Agreement]:
    """Agreement of each pair's greedy completions."""
    completions = {model.name: model.complete(prompts, COMPLETION_TOKENS) for model in models}
    result = {}
    for compared, base in pairs:
        both = zip(completions[compared], completions[base], strict=True)
        common = [common_prefix(*pair) for pair in both]
        result[f"{compared} / {base}"] = Agreement(
            tokens_until_divergence=round(sum(common) / (len(common) * COMPLETION_TOKENS), 4),
            whole_completions=round(sum(length == COMPLETION_TOKENS for length in common) / len(common), 4),
        )
    return result


def markdown(raw: dict[str, object], comparison: Comparison) -> str:
    """The result as a Markdown page."""
    environment, text = raw["environment"], raw["text"]
    perplexity, agreement, greedy = raw["perplexity"], raw["next_token"], raw["greedy"]
    assert isinstance(environment, dict)
    assert isinstance(text, dict)
    assert isinstance(perplexity, dict)
    assert isinstance(agreement, dict)
    assert isinstance(greedy, dict)
    base = perplexity["bfloat16"]
    lines = [
        f"# Quality of `{comparison.flag}`, {environment['date']}",
        "",
        f"{DEFAULT_MODEL}, {raw['instruction_set'] or 'plain torch'}, commit {environment['commit']}. Its weights were "
        f"distributed with 4 bits (GGUF Q4_1) and are served as bfloat16; {raw['note']}.",
        "",
        f"Perplexity over {text['tokens']:,} tokens of {text['name']} (Python {text['python']}, SHA-256 of the text "
        f"`{text['sha256'][:16]}`), windows of {WINDOW:,}, {STRIDE} apart:",
        "",
        f"| {comparison.subject} | perplexity | against bfloat16 |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {value:.3f} | {(value / base - 1) * 100:+.2f} % |" for name, value in perplexity.items()),
        "",
        f"Agreement: the most likely next token, given the text so far; and greedy completions of {COMPLETION_TOKENS} "
        f"tokens of {len(PROMPTS)} chat prompts, where one different token makes all later ones differ:",
        "",
        "| pair | same most likely token | KL divergence, nats | greedy tokens before the first that differs | "
        "completions equal to the end |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for pair, values in agreement.items():
        cells = (
            f"{values['same_most_likely_token'] * 100:.1f} %",
            f"{values['mean_kl_divergence_nats']:.5f}",
            f"{greedy[pair]['tokens_until_divergence'] * 100:.0f} %",
            f"{greedy[pair]['whole_completions'] * 100:.0f} %",
        )
        lines.append(f"| {pair} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _note(comparison: Comparison, path: Path) -> str:
    if comparison is WEIGHTS:
        return "that is the baseline of int8"
    scales = read_kv_scales(path, ModelConfig.from_dir(path))
    if bool((scales == 1).all()):
        return "scales of the fp8 KV cache are all 1, because the checkpoint has none"
    return "scales of the fp8 KV cache are those of the checkpoint"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=COMPARISONS, default="weights", help="subject of the comparison")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of text for the perplexity")
    parser.add_argument("--threads", type=int, help="compute threads; default: torch's")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the result files")
    return parser.parse_args()


def main() -> None:
    """Command line entry."""
    arguments = _arguments()
    comparison = COMPARISONS[arguments.what]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    environment = describe()
    path = resolve_model().path
    tokenizer, template = read_tokenizer(path), ChatTemplate.from_dir(path)
    text = reference_text()
    tokens = tokenizer.encode(text, add_special_tokens=False)[: arguments.tokens]
    if len(tokens) < max(arguments.tokens, WINDOW):
        sys.exit(f"error: --tokens must be from {WINDOW} to {len(tokens)}, the length of the text.")
    chats = [template.render([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    models = [Model.load(name, path, comparison.backend, arguments.threads) for name in comparison.models]
    perplexity, agreement = score(models, comparison.pairs, tokens)
    greedy = complete_all(models, comparison.pairs, prompts)
    raw = {
        "environment": environment,
        "model": DEFAULT_MODEL,
        "note": _note(comparison, path),
        "instruction_set": models[0].decoder.kernels.instruction_set,
        "text": {
            "name": "pydoc_data.topics",
            "python": platform.python_version(),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": len(tokens),
        },
        "window": WINDOW,
        "stride": STRIDE,
        "perplexity": perplexity,
        "next_token": agreement,
        "greedy": {pair: asdict(value) for pair, value in greedy.items()},
        "completion_tokens": COMPLETION_TOKENS,
        "prompts": PROMPTS,
    }
    page = markdown(raw, comparison)
    print(page)
    write_results(arguments.out, f"{comparison.result_name}-{environment['date']}", raw, page)


if __name__ == "__main__":
    main()
