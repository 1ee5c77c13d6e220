"""A request as the decode tier's policy sees it: what was requested, its phase, and the table of its moves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pdserve.base.errors import InvalidTransition, RequestError
from pdserve.base.ids import AttemptId, BlockHash, BlockTables, RequestId
from pdserve.base.sampling import check_vocabulary
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.job import PromptJob
from pdserve.engine.sequence import SampleRow, Sequence
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.spare_time import is_decoding_next
from pdserve.engine.step import Grant, PrefillChunk, PrefillProgress, RequestStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob(PromptJob):
    """One request to decode."""

    #: Maximum number of uncached prompt tokens with which the prompt is computed here, without a grant; 0 for never.
    #: A prompt that misses more blocks than can be received is computed here in any case.
    local_prefill_threshold: int = 0
    #: Tokens that the client has already of choices that go on, by choice: another worker has sampled them.
    output: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: Choices that are over.
    over: frozenset[int] = frozenset()
    #: The request still runs on another decode worker, which sends the full blocks of prompt and output.
    is_moving: bool = False
    #: As in `Reservation`.
    senders_ask: bool = False

    def require_continuable(self, limits: SequenceLimits) -> None:
        """Raises `RequestError` unless the output so far is one that this request can have."""
        listed = [*self.output, *self.over]
        if len(set(listed)) < len(listed) or not all(0 <= choice < self.params.n for choice in listed):
            raise RequestError(
                f"output lists the choices {listed}, but must have each once, and only from 0 to {self.params.n - 1}.",
                param="output",
            )
        if len(self.over) == self.params.n:
            raise RequestError("All choices are over. Send no request for which nothing is left.", param="output")
        room = min(self.params.max_tokens, limits.max_model_len - len(self.prompt_token_ids))
        for choice, tokens in self.output.items():
            if not 0 < len(tokens) < room:
                raise RequestError(
                    f"output has {len(tokens)} tokens of choice {choice}; one that goes on has 1 to {room - 1}.",
                    param="output",
                )
            check_vocabulary("output", tokens, limits.vocab_size)
        if self.is_moving and len(listed) < self.params.n:
            raise RequestError(
                f"Only {len(listed)} of {self.params.n} choices have output. Move a request once all have.",
                param="output",
            )


class DecodePhase(Enum):
    """Where a request stands on this worker."""

    WAITING = "waiting for blocks"
    RESERVED = "waiting for its KV"
    COMPUTING = "computing its prompt"
    RUNNING = "running"
    OVER = "over"


class DecodeMove(Enum):
    """Everything that changes the phase of a request."""

    GRANT = "a grant of blocks for a transfer"
    COMPUTE = "local prefill"
    ACTIVATE = "activation of received KV"
    RUN = "decoding after local prefill"
    #: Every choice has ended, or was stopped.
    FINISH = "finishing"
    #: A token could not be sampled.
    FAIL = "failing"
    #: The request's owner lets go of it.
    ABORT = "aborting"


_P, _M = DecodePhase, DecodeMove

#: Every legal move, with the phase that it leads to.
TRANSITIONS: dict[tuple[DecodePhase, DecodeMove], DecodePhase] = {
    (_P.WAITING, _M.GRANT): _P.RESERVED,
    (_P.WAITING, _M.COMPUTE): _P.COMPUTING,
    # The transfer was given up: the prompt is computed into the blocks that waited for it.
    (_P.RESERVED, _M.COMPUTE): _P.COMPUTING,
    (_P.RESERVED, _M.ACTIVATE): _P.RUNNING,
    (_P.COMPUTING, _M.RUN): _P.RUNNING,
    # A RESERVED request cannot finish: until its transfer has ended, the transfer may write to its blocks.
    (_P.WAITING, _M.FINISH): _P.OVER,
    (_P.COMPUTING, _M.FINISH): _P.OVER,
    (_P.RUNNING, _M.FINISH): _P.OVER,
    (_P.COMPUTING, _M.FAIL): _P.OVER,
    (_P.RUNNING, _M.FAIL): _P.OVER,
    (_P.WAITING, _M.ABORT): _P.OVER,
    (_P.RESERVED, _M.ABORT): _P.OVER,
    (_P.COMPUTING, _M.ABORT): _P.OVER,
    (_P.RUNNING, _M.ABORT): _P.OVER,
}


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest:
    """A request on this worker. Mutable, owned by the scheduler; only `advance` changes the phase."""

    job: DecodeJob
    #: The bare prompt; becomes the sequence of the first choice that goes on.
    prompt_sequence: Sequence
    phase: DecodePhase = DecodePhase.WAITING
    #: Whether the prompt is computed here, or will be.
    locally: bool = False
    #: First tokens that the client has already; empty when they are to be sampled here.
    forced_first_tokens: tuple[int, ...] = ()
    #: Prompt tokens that the prefix cache had.
    num_cached: int = 0
    #: Whether another numerics class has computed blocks of the prompt, which no other request may use.
    is_isolated: bool = False
    #: Choices that were stopped, whether they run already or not.
    stopped: set[int] = field(default_factory=set)
    #: Output that is known of choices which do not run yet.
    output: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: Hashes of the blocks that a moving request holds or receives, in the order of its ticket.
    moved: list[BlockHash] = field(default_factory=list)
    #: Active and preempted sequences by choice; only the prompt's while the prompt is computed.
    sequences: dict[int, Sequence] = field(default_factory=dict)
    #: The attempt that its events are for.
    attempt_id: AttemptId = field(init=False)

    def __post_init__(self) -> None:
        self.attempt_id = self.job.attempt_id

    @classmethod
    def of(cls, job: DecodeJob) -> ScheduledRequest:
        """A request that has just arrived."""
        return cls(job=job, prompt_sequence=job.new_sequence(), stopped=set(job.over), output=dict(job.output))

    @property
    def request_id(self) -> RequestId:
        """Global id of the request."""
        return self.job.request_id

    def allows(self, move: DecodeMove) -> bool:
        """Whether the table has this move for the present phase. Moving requests do not compute their prompt."""
        return (self.phase, move) in TRANSITIONS and not (move is DecodeMove.COMPUTE and self.job.is_moving)

    def require(self, move: DecodeMove) -> None:
        """Raises `InvalidTransition` unless the table has this move for the present phase."""
        if not self.allows(move):
            wanted = " or ".join(phase.value for phase, legal in TRANSITIONS if legal is move)
            raise InvalidTransition(
                f"Request {self.request_id} is {self.phase.value}, but {move.value} needs a request that is {wanted}."
            )

    def advance(self, move: DecodeMove) -> None:
        """Move on. Raises `InvalidTransition` for an illegal move, which changes nothing."""
        self.require(move)
        self.phase = TRANSITIONS[self.phase, move]

    def start_computing(self, admission_order: int) -> None:
        """The prompt is computed here: until its last chunk, its sequence is the only one."""
        self.locally = True
        self.num_cached = self.prompt_sequence.num_computed
        self.prompt_sequence.admission_order = admission_order
        self.sequences = {0: self.prompt_sequence}

    def chunk(self, sequence: Sequence, stop: int, limits: SequenceLimits) -> PrefillChunk:
        """Tokens `[num_computed, stop)` of the prompt, or of a preempted choice; the last chunk is sampled from."""
        samples: tuple[SampleRow, ...] = ()
        is_output = is_decoding_next(sequence)
        if stop == sequence.num_tokens:
            if sequence.sampling is not None:
                samples = (sequence.sampling,)
            else:
                samples = tuple(limits.sample_row(sequence, choice) for choice in self.sampled_choices())
        return PrefillChunk(
            sequence=sequence, start=sequence.num_computed, stop=stop, samples=samples, is_output=is_output
        )

    def sampled_choices(self) -> tuple[int, ...]:
        """Choices whose first token is to be sampled here."""
        if self.forced_first_tokens:
            return ()
        known = self.stopped | self.output.keys()
        return tuple(choice for choice in range(self.job.params.n) if choice not in known)

    def first_tokens(self, found: Mapping[int, int]) -> dict[int, int]:
        """The first token of each choice: the client's where it has one, else that of `found`."""
        known = {choice: tokens[0] for choice, tokens in self.output.items()}
        return dict(sorted({**found, **known}.items()))

    # Events.
    def granted(self, blocks: BlockManager) -> Grant:
        """The request is RESERVED."""
        if self.job.is_moving:
            num_cached, table = self.num_cached // blocks.pool.block_size, tuple(self.prompt_sequence.held_blocks())
            return Grant(
                request_id=self.request_id,
                attempt=self.job.attempt,
                block_tables=(table[::-1],),
                num_cached_blocks=num_cached,
                first_missing=(num_cached,),
            )
        return Grant(
            request_id=self.request_id,
            attempt=self.job.attempt,
            block_tables=blocks.prompt_blocks(self.prompt_sequence),
            num_cached_blocks=self.num_cached // blocks.pool.block_size,
            first_missing=blocks.first_missing(self.prompt_sequence.num_prompt, self.num_cached),
        )

    def started(self, block_tables: BlockTables) -> RequestStarted:
        """A step computes something of the request for the first time; `block_tables` are the prompt's."""
        return RequestStarted(
            request_id=self.request_id,
            attempt=self.job.attempt,
            prefilled_locally=self.locally,
            num_cached=self.num_cached,
            block_tables=block_tables,
        )

    def progress(self) -> PrefillProgress:
        """A chunk of the prompt was computed."""
        return PrefillProgress(
            request_id=self.request_id,
            attempt=self.job.attempt,
            num_computed=self.prompt_sequence.num_computed,
            num_prompt=self.prompt_sequence.num_prompt,
            num_cached=self.num_cached,
        )
