"""What the choices of completions and chats have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.base.sampling import FinishReason, TokenLogprobs
from router_svc.api.openai.answers import Ending
from router_svc.request.output import ChoiceDelta


@dataclass(slots=True)
class CollectedChoice:
    """The whole output of one choice."""

    #: The text that each token completed.
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    #: Log-probabilities of the prompt's tokens behind the first one.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Adds new output, or the scores of the prompt."""
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
            return
        if self.text and not delta.token_ids:
            self.text[-1] += delta.text
        else:
            self.text.extend(delta.pieces or (delta.text,))
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def ending(choice: ChoiceDelta | CollectedChoice) -> Ending:
    """How the choice has ended, if it has."""
    return {
        "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
        "stop_reason": choice.stop_reason,
    }
