"""One prompt to complete, as a value that the API layers make and a saga runs."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.ids import RequestId
from pdserve.base.pooling import Pooling, PoolingKind
from pdserve.base.sampling import SamplingParams

#: Limit on the amount of a request's priority.
MAX_PRIORITY = 2**31 - 1
#: Priority of requests of a batch, which no client can set: all others come first, on every router and worker.
BATCH_PRIORITY = MAX_PRIORITY + 1


def is_best_effort(priority: int) -> bool:
    """Whether requests of this priority get only what others leave, in queues and in the steps of workers."""
    return priority == BATCH_PRIORITY


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How tokens become text. Only the router needs these rules."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    #: Special tokens that are text nevertheless: the router reads them before the client gets the rest.
    kept_tokens: tuple[int, ...] = ()
    #: Bytes of an incomplete character, mostly none, at the end of the text that the output continues; None: the output
    #: is a text of its own.
    unfinished: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A prompt with everything that decides its completion."""

    request_id: RequestId
    #: The id that workers get, which is unique even when a client repeats a request id.
    worker_request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    text: TextRules
    #: Index of this prompt's first choice in the response.
    first_choice: int = 0
    #: Alternatives to report of each prompt token with its log-probability; None: prompts have no log-probabilities.
    prompt_logprobs: int | None = None
    #: How the prompt becomes an embedding, with the number of its dimensions. None: the request has an output instead.
    pooling: Pooling | None = None
    #: Requests with lower values are admitted first.
    priority: int = 0
    #: Isolates prefix reuse between tenants; empty shares it.
    cache_salt: bytes = b""
    #: Who may read its trace, besides admins.
    tenant: str = ""
    #: The API that received the request, for the decision record.
    endpoint: str

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether each token of the prompt is computed, whatever is cached."""
        is_pooled_whole = self.pooling is not None and self.pooling.kind is not PoolingKind.LAST
        return is_pooled_whole or self.prompt_logprobs is not None
