"""Comparison of results: bit by bit where that is promised, else within the error of another order of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.property.model.plans import Computed

_AS_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def assert_same_bits(ours: Sequence[Computed], expected: Sequence[Computed]) -> None:
    """Asserts equal bits of all KV, and of the logits of all positions in `ours`."""
    _compare(ours, expected, lambda one, other: one.view(_AS_BITS[one.dtype]) != other.view(_AS_BITS[other.dtype]))


def assert_close(ours: Sequence[Computed], expected: Sequence[Computed], tolerance: float) -> None:
    """Asserts that no value differs by more than `tolerance` times the largest value."""

    def differ(one: Tensor, other: Tensor) -> Tensor:
        return ~((one.float() - other.float()).abs() <= tolerance * other.float().abs().amax())

    _compare(ours, expected, differ)


def _compare(
    ours: Sequence[Computed], expected: Sequence[Computed], differ: Callable[[Tensor, Tensor], Tensor]
) -> None:
    for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
        positions = sorted(one.logits)
        assert positions, f"sequence {index} has no logits"
        rows = torch.stack([one.logits[position] for position in positions])
        expected_rows = torch.stack([other.logits[position] for position in positions])
        for values, references, what in (
            (one.kv, other.kv, "KV [layer, K|V, head, position, dimension]"),
            (rows, expected_rows, f"logits [row, token] of positions {positions}"),
        ):
            assert values.isfinite().all(), f"sequence {index}: {what}: not finite"
            differs = differ(values, references)
            if differs.any():
                first = tuple(differs.nonzero()[0].tolist())
                max_difference = float((values.float() - references.float()).abs().max())
                raise AssertionError(
                    f"sequence {index}: {what}: {int(differs.sum())} of {differs.numel()} differ, at most by "
                    f"{max_difference:.3g}; the first at {first}, {float(values[first])!r} instead of "
                    f"{float(references[first])!r}"
                )
