"""How fast steps are: measured on the step thread, and given to schedulers, which size prefill chunks by it. Pure.

Source: Agrawal et al., "Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve" (OSDI 2024): chunks of
prompts share a step with decoding sequences, sized so that the step stays within the time between two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Weight of the newest step in the averages: about the last five count.
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Averages of the latest steps. The defaults, of a slow machine, hold until there was a first step of the kind."""

    #: Seconds of a step that only decodes.
    decode_step_s: float = 0.02
    #: Seconds that each token of a prefill chunk adds to a step.
    prefill_token_s: float = 0.001

    def tokens_within(self, budget_s: float) -> int:
        """Tokens of prefill chunks to compute beside decoding sequences, for a step of at most `budget_s`.

        Where decoding alone takes most of that, as under overload, prefill still gets half as much time again: kept
        waiting, prompts would time out while the gaps between tokens hardly became shorter.
        """
        return int(self._prefill_s(budget_s) / self.prefill_token_s)

    def prefill_tokens_per_s(self, budget_s: float | None = None) -> float:
        """Prompt tokens computed in a second: alone, or beside decoding sequences in steps of at most `budget_s`."""
        if budget_s is None:
            return 1 / self.prefill_token_s
        prefill_s = self._prefill_s(budget_s)
        return prefill_s / (self.decode_step_s + prefill_s) / self.prefill_token_s

    def _prefill_s(self, budget_s: float) -> float:
        return max(budget_s - self.decode_step_s, self.decode_step_s / 2)


class PaceMeter:
    """Learns the pace from step to step."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._has_decoded = False
        # Of the latest prefills together: a short one costs hardly more than its step, and says little.
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0

    def observe(self, *, num_decoding: int, num_prefill_tokens: int, step_s: float) -> None:
        """One step that computed this much in `step_s` seconds."""
        decode_step_s, prefill_token_s = self.pace.decode_step_s, self.pace.prefill_token_s
        if num_prefill_tokens:
            # What the decoding sequences beside it cost is known from steps of their own. At least a tenth is the
            # prefill's: a step that was quicker than expected must not make prefill look free.
            own_s = max(step_s - decode_step_s, step_s / 10) if num_decoding else step_s
            self._prefill_s += own_s - _WEIGHT * self._prefill_s
            self._prefill_tokens += num_prefill_tokens - _WEIGHT * self._prefill_tokens
            prefill_token_s = self._prefill_s / self._prefill_tokens
        elif num_decoding:
            decode_step_s = decode_step_s + _WEIGHT * (step_s - decode_step_s) if self._has_decoded else step_s
            self._has_decoded = True
        self.pace = Pace(decode_step_s=decode_step_s, prefill_token_s=prefill_token_s)
