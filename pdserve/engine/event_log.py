"""What a scheduler collects between two steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.base.errors import PdserveError, RequestError
from pdserve.base.ids import AttemptId, RequestId
from pdserve.base.sampling import ChoiceTokens
from pdserve.engine.block_pool import CacheEvents
from pdserve.engine.sequence import Fault, SampleFailure
from pdserve.engine.step import (
    Grant,
    PrefillProgress,
    PromptEmbedding,
    PromptScores,
    RequestFailure,
    RequestStarted,
    RequestTokens,
    StepEvents,
)
from pdserve.peers.workers import Tier


@dataclass(slots=True, kw_only=True)
class StepEventLog:
    """Collects events between two steps; a scheduler owns one."""

    tier: Tier
    grants: list[Grant] = field(default_factory=list)
    started: list[RequestStarted] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    scores: list[PromptScores] = field(default_factory=list)
    embeddings: list[PromptEmbedding] = field(default_factory=list)
    tokens: dict[AttemptId, list[ChoiceTokens]] = field(default_factory=dict)
    failures: list[RequestFailure] = field(default_factory=list)
    preempted: list[AttemptId] = field(default_factory=list)
    finished: list[AttemptId] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(self._kinds())

    def fail(self, attempt_id: AttemptId, failure: SampleFailure) -> None:
        """Report a request that ends because of a failure."""
        kind = RequestError if failure.fault is Fault.REQUEST else PdserveError
        error = kind(f"Request {attempt_id.request_id} cannot go on: {failure.reason}.")
        self.failures.append(RequestFailure(**attempt_id._asdict(), error=error, fault=failure.fault))

    def forget_finished(self, request_id: RequestId) -> None:
        """Do not report that a request has finished, if that is still to be reported."""
        self.finished = [each for each in self.finished if each.request_id != request_id]

    def drain(self, cache: CacheEvents) -> StepEvents:
        """Return all events since the last call."""
        events = StepEvents(
            tier=self.tier,
            grants=tuple(self.grants),
            started=tuple(self.started),
            progress=tuple(self.progress),
            scores=tuple(self.scores),
            embeddings=tuple(self.embeddings),
            tokens=tuple(
                RequestTokens(request_id=request_id, attempt=attempt, choices=tuple(choices))
                for (request_id, attempt), choices in self.tokens.items()
            ),
            failures=tuple(self.failures),
            preempted=tuple(self.preempted),
            finished=tuple(self.finished),
            cache=cache,
        )
        for kind in self._kinds():
            kind.clear()
        return events

    def _kinds(self) -> tuple[list[Any] | dict[AttemptId, Any], ...]:
        work = self.grants, self.started, self.progress, self.scores, self.embeddings, self.tokens
        return (*work, self.failures, self.preempted, self.finished)
