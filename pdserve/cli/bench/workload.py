"""What a benchmark sends and what it saw: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"

#: Text, or token ids, whose number every server counts alike.
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request of a workload: a prompt, and how many tokens may be generated."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test and what every request to it says.

    `fields` are added to each body: sampling parameters, `ignore_eos` and whatever else the server takes.
    """

    base_url: str
    model: str
    endpoint: str = COMPLETIONS
    fields: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    silence_timeout_s: float = 600.0

    @property
    def is_chat(self) -> bool:
        """Whether prompts go out as one user message, which must be text."""
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def body(self, request: BenchRequest) -> dict[str, object]:
        """The request's JSON body: streamed, with the server's own count of tokens at the end."""
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
class Failure:
    """Why a request failed: a reason that can be counted, and the words that came with it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What was seen of one request. `start_s` counts from the start of the run, all other times from `start_s`.

    `arrivals_s` are the arrivals of chunks with tokens: a chunk with several tokens is one arrival, and chunks that
    one read of the connection brought have the same time. `end_s` is the arrival of the last chunk that told of the
    completion. The numbers of tokens are those of the server's `usage` if `is_counted_by_server`; else the output is
    counted as one token an arrival, and the input is as long as the prompt if that was sent as token ids, else 0.
    """

    start_s: float
    end_s: float
    arrivals_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    is_counted_by_server: bool = True
    text: str = ""
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token. Only for requests that did not fail."""
        return self.arrivals_s[0]

    @property
    def itls_s(self) -> tuple[float, ...]:
        """Times between arrivals, one fewer than arrivals."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_s))

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None when there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.end_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: from sending to the last chunk of the completion."""
        return self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What a run of a workload gave: one record for each request, in the workload's order."""

    duration_s: float
    records: tuple[RequestRecord, ...]

    @property
    def completed(self) -> tuple[RequestRecord, ...]:
        """The requests that did not fail."""
        return tuple(record for record in self.records if record.failure is None)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What the others failed of."""
        return tuple(record.failure for record in self.records if record.failure is not None)
