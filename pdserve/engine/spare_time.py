"""What the ITL budget leaves of a step for best-effort sequences. Pure."""

from __future__ import annotations

from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sequence

#: Share of the ITL budget that a step with best-effort sequences may take as predicted. Many steps take longer.
_BEST_EFFORT_SHARE = 0.75


class SpareTime:
    """What the ITL budget leaves of a step for best-effort sequences, while it is planned."""

    def __init__(self, pace: Pace, budget_s: float) -> None:
        self._pace = pace
        self._left_s = _BEST_EFFORT_SHARE * budget_s - pace.base_step_s

    def num_tokens_of(self, sequence: Sequence) -> int:
        """The sequence's tokens for which there is time."""
        if is_decoding_next(sequence):
            return int(self._left_s >= self._pace.decode_row_s)
        return max(0, int(self._left_s / self._pace.prefill_token_s))

    def take(self, num_prefill_tokens: int) -> None:
        """The step computes these tokens."""
        self._left_s -= num_prefill_tokens * self._pace.prefill_token_s

    def take_row(self) -> None:
        """The step decodes a token."""
        self._left_s -= self._pace.decode_row_s


def is_decoding_next(sequence: Sequence) -> bool:
    """Whether the next step decodes a token of the sequence, and computes those that were forced with its last one."""
    num_pending = len(sequence.tokens) - sequence.num_computed
    return sequence.sampling is not None and 0 < num_pending <= 1 + sequence.num_forced
