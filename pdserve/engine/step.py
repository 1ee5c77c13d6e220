"""Values of one step: what a scheduler plans, what the sampler returns, and what the service receives. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import PdserveError
from pdserve.base.ids import AttemptId, BlockId, BlockTables, RequestId, RouterId
from pdserve.base.sampling import ChoiceTokens, TokenLogprobs
from pdserve.engine.block_pool import CacheEvents
from pdserve.engine.hidden_sum import HiddenSum
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Fault, SampleRow, Sequence
from pdserve.peers.workers import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prefill of tokens `[start, stop)` of one sequence; `samples` are then sampled from its last row."""

    sequence: Sequence
    start: int
    stop: int
    samples: tuple[SampleRow, ...] = ()
    #: What is sampled from its first rows, one from each: the tokens that follow them in the prompt.
    scores: tuple[SampleRow, ...] = ()
    #: Where the hidden states of `pooled_rows` are added, of a prompt that is pooled.
    pool: HiddenSum | None = None
    #: Tokens of an output: the last one, and those that were forced behind it.
    is_output: bool = False
    #: Rows of the chunk, from 0. Only chunks that have neither samples nor scores have them.
    pooled_rows: range = range(0)

    @property
    def num_logits(self) -> int:
        """Rows whose logits, or hidden states, are needed."""
        return len(self.scores) + bool(self.samples) + len(self.pooled_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersWritten:
    """KV of prompt tokens `[0, num_computed)` is stored for layers `[0, num_layers)`; reported during the step.

    Kernels that compute a step in one call do not report it. The end of the step then stands for all layers.
    """

    request_id: RequestId
    attempt: int
    num_layers: int
    num_computed: int
    #: All blocks of the prompt, in order.
    block_tables: BlockTables
    #: Happens when the KV is stored; None: it is stored already.
    ready_event: DeviceEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Work of one step: the last token of each decoding sequence, and chunks of sequences in prefill.

    Each decoding sequence gets one token, sampled by its `sampling`. Samples are in the order of the rows: those of
    decoding sequences first, and those of a chunk behind its scores.
    """

    decoding: tuple[Sequence, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    #: (source, destination) blocks to copy first, in this order.
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    #: Reports to send as soon as they are true.
    reports: tuple[LayersWritten, ...] = ()
    #: Planned before the previous step's tokens were known: its sequences again, each one token beyond its `tokens`.
    is_ahead: bool = False

    @property
    def is_pooled(self) -> bool:
        """Whether the step computes hidden states instead of logits."""
        return any(chunk.pooled_rows for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decoding) + sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        """Those of prompts, and of preempted sequences."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks if not chunk.is_output)

    def sample_rows(self) -> tuple[list[SampleRow], list[int]]:
        """All samples in order, and for each the row of logits that it is sampled from; n choices can share a row."""
        rows = [sequence.sampling for sequence in self.decoding if sequence.sampling is not None]
        logits_rows = list(range(len(rows)))
        num_logits = len(rows)
        for chunk in self.chunks:
            rows += (*chunk.scores, *chunk.samples)
            last = num_logits + len(chunk.scores)
            logits_rows += (*range(num_logits, last), *[last] * len(chunk.samples))
            num_logits += chunk.num_logits
        return rows, logits_rows

    def without(self, request_ids: Collection[RequestId]) -> StepPlan:
        """The plan without some requests. Their copies stay: no other request holds the blocks."""
        return replace(
            self,
            decoding=tuple(each for each in self.decoding if each.request_id not in request_ids),
            chunks=tuple(each for each in self.chunks if each.sequence.request_id not in request_ids),
            reports=tuple(each for each in self.reports if each.request_id not in request_ids),
        )

    def scheduled(self) -> list[Sequence]:
        """The sequences in the order of their rows."""
        return [*self.decoding, *(chunk.sequence for chunk in self.chunks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The request holds its blocks. In each KV group those from `first_missing` on are to be received."""

    request_id: RequestId
    attempt: int
    #: All blocks of the prompt, in order.
    block_tables: BlockTables
    num_cached_blocks: int
    #: Index of a block in each table.
    first_missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted:
    """The request was scheduled for the first time, in this step."""

    request_id: RequestId
    attempt: int
    #: False only for a decode request whose KV was received.
    prefilled_locally: bool
    #: Prompt tokens found in the prefix cache.
    num_cached: int
    #: All blocks of the prompt, in order.
    block_tables: BlockTables


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """KV of prompt tokens `[0, num_computed)` is stored; reported after each chunk."""

    request_id: RequestId
    attempt: int
    num_computed: int
    num_prompt: int
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probabilities of prompt tokens `[first, first + len(logprobs))`, each given all tokens before it."""

    request_id: RequestId
    attempt: int
    first: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbedding:
    """The embedding of a prompt, whose last chunk was computed."""

    request_id: RequestId
    attempt: int
    #: Little-endian float32.
    values: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTokens:
    """New tokens of a request, at most one `ChoiceTokens` per choice."""

    request_id: RequestId
    attempt: int
    choices: tuple[ChoiceTokens, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """The request failed and holds no resources any more; other requests are not affected."""

    request_id: RequestId
    attempt: int
    error: PdserveError
    fault: Fault = Fault.LOGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """Events of one tier's scheduler since those of its last step, each kind in order."""

    tier: Tier
    grants: tuple[Grant, ...] = ()
    started: tuple[RequestStarted, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    embeddings: tuple[PromptEmbedding, ...] = ()
    tokens: tuple[RequestTokens, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    #: Requests with a preempted sequence, once for each such sequence.
    preempted: tuple[AttemptId, ...] = ()
    #: Decode: requests whose choices have all ended; they hold no resources any more.
    finished: tuple[AttemptId, ...] = ()
    cache: CacheEvents = field(default_factory=CacheEvents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a worker; totals count from its start."""

    #: Sequences (decode) or prompts (prefill) that are being computed.
    num_running: int
    #: Requests and preempted sequences that wait to run.
    num_waiting: int
    #: Decode: requests that hold blocks for a transfer. Prefill: computed prompts whose blocks are still held.
    num_held: int
    #: Tokens of prompts and of preempted sequences that are still to be computed here.
    queued_prompt_tokens: int
    #: The share of `queued_prompt_tokens` whose prompts have no first token yet, by the router that sent them.
    queued_by_router: Mapping[RouterId, int]
    free_blocks: int
    total_blocks: int
    #: Blocks held for transfers that have not been received.
    reserved_blocks: int
    #: Free blocks that waiting requests and preempted sequences need before they can run.
    waiting_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, in any phase."""
        return self.num_running == self.num_waiting == self.num_held == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDurations:
    """Seconds spent in each phase of a step."""

    schedule_s: float
    build_s: float
    forward_s: float
    sample_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.schedule_s + self.build_s + self.forward_s + self.sample_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Output of one step; published once per step."""

    events: StepEvents
    load: Load
    durations: StepDurations
    #: Averages up to and including this step.
    pace: Pace
    #: The step was launched before the previous one had ended.
    is_ahead: bool
    #: Sequences and tokens of the batch.
    num_sequences: int
    num_tokens: int
    #: The share of `num_tokens` that prefills prompts or recomputes preempted sequences.
    num_prefill_tokens: int
