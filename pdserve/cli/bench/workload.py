"""Requests of a benchmark and records of their results. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"

#: Text or token ids. All servers count the latter alike.
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request of a workload: a prompt and the maximum number of tokens to generate."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test and the common fields of all requests.

    `fields` are added to each body: sampling parameters, `ignore_eos` and anything else the server takes.
    """

    base_url: str
    model: str
    endpoint: str = COMPLETIONS
    fields: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    silence_timeout_s: float = 600.0

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as one user message, which must be text."""
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def body(self, request: BenchRequest) -> dict[str, object]:
        """JSON body of a request: streamed, with the server's count of tokens at the end."""
        if self.is_chat:
            prompt: dict[str, object] = {"messages": [{"role": "user", "content": request.prompt}]}
        else:
            prompt = {"prompt": request.prompt}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """Cause of a failed request: a reason to count it by, and the message that came with it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Measurements of one request. `start_s` is relative to the start of the run, all other times to `start_s`.

    `arrivals_s` are the arrivals of chunks with tokens: a chunk with several tokens is one arrival, and chunks from one
    read of the connection have the same time. `end_s` is the arrival of the completion's last chunk. Token counts are
    those of the server's `usage` if `is_counted_by_server`. Otherwise each arrival counts as one output token, and the
    input counts as the length of a prompt of token ids, or 0 for text.
    """

    start_s: float
    end_s: float
    arrivals_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    is_counted_by_server: bool = True
    text: str = ""
    failure: RequestFailure | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token. Only for requests that did not fail."""
        return self.arrivals_s[0]

    @property
    def itls_s(self) -> tuple[float, ...]:
        """Gaps between arrivals, one fewer than arrivals."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_s))

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.end_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: from sending to the last chunk of the completion."""
        return self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Result of a run: one record per request, in the workload's order."""

    duration_s: float
    records: tuple[RequestRecord, ...]

    @property
    def completed(self) -> tuple[RequestRecord, ...]:
        """The requests that did not fail."""
        return tuple(record for record in self.records if record.failure is None)

    @property
    def failures(self) -> tuple[RequestFailure, ...]:
        """Causes of the requests that failed."""
        return tuple(record.failure for record in self.records if record.failure is not None)
