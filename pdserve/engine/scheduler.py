"""What the step thread requires of a scheduler: the policy of one tier, or of both."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from pdserve.base.ids import RequestId
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import SampleFailure, SampleResult
from pdserve.engine.step import Load, StepEvents, StepPlan


class Scheduler(Protocol):
    """Policy of one tier: pure, driven by the step thread only."""

    def has_work(self) -> bool:
        """Whether a step would compute or report anything. If not, only a call from outside can change that."""

    def schedule(self, pace: Pace) -> StepPlan:
        """Plan the next step, expected to run at `pace`. Only `plan_ahead` may be called before its `update`."""

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is in flight; None when that depends on the tokens of `plan`.

        `update` must follow for both, in order. Sequences may end in the first; their results of the second are
        dropped.
        """

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        """Process the results of a step: one for each decoding sequence, then those of the chunks.

        Allocates no blocks: a step in flight may still write to those that are freed here.
        """

    def fail(self, request_id: RequestId, failure: SampleFailure) -> None:
        """End a request of the plan that `schedule` has just returned, which is then run without it."""

    def load(self) -> Load:
        """The current load."""
