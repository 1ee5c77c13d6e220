"""One prompt to complete, as a value: what the API layers make and the saga runs."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How tokens become text, which is the router's business alone."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A prompt with everything that decides its completion. Never changed once made."""

    request_id: RequestId
    #: The id workers know it by: unique even when a client sends one request id twice.
    worker_request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    text: TextRules
    #: Choice i of this prompt is number `first_choice + i` in the response.
    first_choice: int = 0
    #: Isolates prefix reuse between tenants; empty: shared.
    cache_salt: bytes = b""
    #: Which API the request came through, for the decision record.
    endpoint: str
