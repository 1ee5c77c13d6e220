"""One prompt to complete, as a value that the API layers make and a saga runs."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams

#: Limit on the amount of a request's priority.
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How tokens become text. Only the router needs these rules."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


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
    #: Requests with lower values are admitted first.
    priority: int = 0
    #: Isolates prefix reuse between tenants; empty shares it.
    cache_salt: bytes = b""
    #: Who may read its trace, besides admins.
    tenant: str = ""
    #: The API that received the request, for the decision record.
    endpoint: str
