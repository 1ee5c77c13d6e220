"""Compares greedy tokens and log-probabilities with those of transformers on the same weights, in float32.

We generate, then transformers runs once over prompt + output. If its best token at each position is ours, transformers
would have generated the same tokens: by induction, each follows an equal prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

#: Difference in nats that another order of float32 sums may cause. With the default model it is 5e-5.
TOLERANCE = 5e-4


class Reference(Protocol):
    """A causal model of transformers."""

    def __call__(self, input_ids: Tensor) -> object: ...


def reference_logits(model: Reference, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Logits of transformers for each position of `output`: float32 [len(output), vocab]."""
    with torch.inference_mode():
        result = model(torch.tensor([[*prompt, *output]]))
    logits: Tensor = result.logits  # type: ignore[attr-defined]
    return logits[0, len(prompt) - 1 : -1].float()


def assert_same(ours: Tensor, output: Sequence[int], theirs: Tensor, name: str) -> None:
    """Asserts equal log-probabilities within the tolerance, and equal tokens unless the two best are as close."""
    theirs = theirs.log_softmax(-1)
    worst = float((ours.log_softmax(-1) - theirs).abs().max())
    assert worst < TOLERANCE, f"{name}: log-probabilities differ by {worst:.2e}"
    best = theirs.topk(2, dim=-1)
    for position, token in enumerate(output):
        if token == int(best.indices[position, 0]):
            continue
        gap = float(best.values[position, 0] - best.values[position, 1])
        assert gap < TOLERANCE, f"{name}: token {position} is {token}, not {int(best.indices[position, 0])} ({gap:.2e})"
