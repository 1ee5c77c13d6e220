"""Speed of steps: measured on the step thread, and used by schedulers to size prefill chunks. Pure.

Source: Agrawal et al., "Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve" (OSDI 2024). Chunks of
prompts share a step with decoding sequences, and are sized to keep the step within the target time between two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

#: Weight of the newest step in the averages, which so cover about the last five steps.
_WEIGHT = 0.2
#: The same of the cost of a row, which changes less, and shows only when steps differ in their rows.
_ROW_WEIGHT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Averages of the latest steps. The defaults, of a slow machine, apply until there was a first step of the kind."""

    #: Duration of a step that only decodes.
    decode_step_s: float = 0.02
    #: Sequences in such a step, and the time that one more of them adds.
    decode_rows: float = 1.0
    decode_row_s: float = 0.02
    #: Time that each token of a prefill chunk adds to a step.
    prefill_token_s: float = 0.001
    #: Time that each row sampled on the host adds to a step; 0 where a device samples.
    sample_row_s: float = 0.0

    def tokens_within(self, budget_s: float) -> int:
        """Prefill tokens that fit into a step of at most `budget_s` in which sequences also decode.

        When decoding alone takes most of the budget, as under overload, prefill still gets half of decoding's time.
        Without it, prompts would time out while the gaps between tokens hardly became shorter.
        """
        return int(self._prefill_s(budget_s) / self.prefill_token_s)

    @property
    def base_step_s(self) -> float:
        """Duration of a step without its sequences, as it follows from what each of them adds."""
        return self.decode_step_s - self.decode_rows * self.decode_row_s

    def tokens_of_samples(self, num_rows: int) -> int:
        """Prefill tokens that take as long as sampling `num_rows` rows, rounded up."""
        return ceil(num_rows * self.sample_row_s / self.prefill_token_s) if self.sample_row_s else 0

    def prefill_tokens_per_s(self, budget_s: float | None = None) -> float:
        """Prompt tokens computed per second: alone, or with decoding sequences in steps of at most `budget_s`."""
        if budget_s is None:
            return 1 / self.prefill_token_s
        prefill_s = self._prefill_s(budget_s)
        return prefill_s / (self.decode_step_s + prefill_s) / self.prefill_token_s

    def _prefill_s(self, budget_s: float) -> float:
        return max(budget_s - self.decode_step_s, self.decode_step_s / 2)


class PaceMeter:
    """Updates the pace after each step."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._has_decoded = False
        self._row_cost = RowCost()
        # Totals of the latest prefills: the time of a short one alone is mostly the step's overhead and says little.
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0

    def observe(
        self,
        *,
        num_decoding: int,
        num_prefill_tokens: int,
        step_s: float,
        num_sampled: int = 0,
        sample_s: float = 0.0,
    ) -> None:
        """Record a step that took `step_s` seconds, of which `sample_s` were spent on sampling `num_sampled` rows.

        `num_sampled` is 0 where a device samples, since waiting for its step takes most of that time.
        """
        decode_step_s, prefill_token_s = self.pace.decode_step_s, self.pace.prefill_token_s
        sample_row_s, decode_rows = self.pace.sample_row_s, self.pace.decode_rows
        if num_sampled:
            row_s = sample_s / num_sampled
            sample_row_s = sample_row_s + _WEIGHT * (row_s - sample_row_s) if sample_row_s else row_s
            # First tokens are no part of decoding, and many choices can share a prompt.
            step_s -= row_s * max(0, num_sampled - num_decoding)
        if num_prefill_tokens:
            # The cost of decoding is known from steps that only decode. At least a tenth of the time is attributed to
            # prefill: a step that was faster than expected must not make prefill look free.
            own_s = max(step_s - decode_step_s, step_s / 10) if num_decoding else step_s
            self._prefill_s += own_s - _WEIGHT * self._prefill_s
            self._prefill_tokens += num_prefill_tokens - _WEIGHT * self._prefill_tokens
            prefill_token_s = self._prefill_s / self._prefill_tokens
        elif num_decoding:
            decode_step_s = decode_step_s + _WEIGHT * (step_s - decode_step_s) if self._has_decoded else step_s
            decode_rows += _WEIGHT * (num_decoding - decode_rows) if self._has_decoded else num_decoding - decode_rows
            self._has_decoded = True
            self._row_cost.observe(num_decoding, step_s)
        self.pace = Pace(
            decode_step_s=decode_step_s,
            decode_rows=decode_rows,
            decode_row_s=self._row_cost.row_s,
            prefill_token_s=prefill_token_s,
            sample_row_s=sample_row_s,
        )


class RowCost:
    """The time that one more sequence adds to a step that only decodes, by least squares over some hundred steps.

    As long as steps have had about equally many sequences, they say little: then the cost tends to a whole share of the
    step, which is more than it can be.
    """

    def __init__(self) -> None:
        self.row_s = Pace().decode_row_s
        self._mean_rows = self._mean_s = 0.0
        self._variance = self._covariance = 0.0
        self._num_steps = 0

    def observe(self, num_rows: int, step_s: float) -> None:
        """Record a step."""
        self._num_steps += 1
        weight = max(_ROW_WEIGHT, 1 / self._num_steps)
        rows, seconds = num_rows - self._mean_rows, step_s - self._mean_s
        self._mean_rows += weight * rows
        self._mean_s += weight * seconds
        self._variance = (1 - weight) * (self._variance + weight * rows * rows)
        self._covariance = (1 - weight) * (self._covariance + weight * rows * seconds)
        share_s = self._mean_s / self._mean_rows
        row_s = (self._covariance + share_s) / (self._variance + 1)
        self.row_s = min(max(row_s, 0.0), share_s)
