"""One token stream on this worker: its tokens, its block table, how much of its KV is computed, and its sampling."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, auto

from pdserve.base.block_hash import hash_blocks
from pdserve.base.ids import BlockHash, BlockId, RequestId, SequenceId, sequence_id
from pdserve.base.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.token_rules import TokenRules
from pdserve.model.grammar import GrammarFailed, GrammarMismatch, TokenBits
from pdserve.model.thinking import OutputGrammar, OutputState, ThinkingState


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """Inputs of sampling the token after `tokens`, besides its logits. Made once for a choice, whose `tokens` grow.

    The token depends on nothing but these fields and its row of logits.
    """

    params: SamplingParams
    choice_index: int
    #: Prompt and output so far: the sequence's own array, not a copy.
    tokens: array[int]
    num_prompt: int
    #: Ids that end the choice.
    stop_ids: frozenset[int] = frozenset()
    #: Follows `tokens`, and knows which ones may come next; None: all may.
    grammar: OutputState | None = None
    #: What the request says of tokens; None: nothing.
    rules: TokenRules | None = None
    #: `rules.allowed`; None: all tokens.
    listed: TokenBits | None = None
    #: The token is the most likely one, and nothing else is reported about it.
    is_argmax: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        is_plain = params.temperature == 0 and params.logprobs is None and params.min_tokens == 0
        is_edited = bool(params.logit_bias or self.grammar or self.rules) or self.penalizes
        object.__setattr__(self, "is_argmax", is_plain and not is_edited)

    @property
    def position(self) -> int:
        """Index of the token within the completion."""
        return len(self.tokens) - self.num_prompt

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that must not be sampled."""
        return self.banned_at(self.position)

    @property
    def penalizes(self) -> bool:
        """Whether tokens so far change how likely they are to occur again."""
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    def banned_at(self, position: int) -> tuple[int, ...]:
        """Ids that must not be sampled at `position`: before `min_tokens`, all that end the choice (see `allowed`).

        And those that would complete a bad word, which are known at the present position only. None of them where the
        end of thinking is required.
        """
        if isinstance(self.grammar, ThinkingState) and self.grammar.required(self.tokens, self.num_prompt) is not None:
            return ()
        early = () if self._knows_end else self._too_early(position)
        if self.rules is None:
            return early
        return tuple(sorted({*early, *self.rules.forbidden(self.tokens, self.num_prompt)}))

    def allowed(self) -> TokenBits | None:
        """The tokens that grammar and rules allow now, valid until the next call; None: all.

        With a grammar before `min_tokens`, none that would end the choice, unless it is complete. Raises
        `GrammarFailed`.
        """
        if self.grammar is None:
            return self.listed
        early = self._too_early(self.position) if self._knows_end else ()
        return self.grammar.allowed(self.tokens, self.num_prompt, early, self.listed)

    @property
    def follows_next(self) -> bool:
        """Whether it depends on the next token which ones may follow it, so that it has to be known first."""
        if self.rules is not None and self.rules.follow_output:
            return True
        return self.grammar is not None and not self.grammar.can_run_ahead(self.tokens, self.num_prompt)

    def find_allowed(self) -> None:
        """Finds what the grammar allows, on whichever thread, so that `allowed` returns at once."""
        if self.grammar is not None:
            self.grammar.find(self.tokens, self.num_prompt)

    @property
    def is_found(self) -> bool:
        """Whether `allowed` would return at once."""
        return self.grammar is None or self.grammar.is_found(self.tokens, self.num_prompt)

    def forced(self, token: int) -> list[int]:
        """Tokens that follow `token`, the next one, whatever the model computes.

        None where log-probabilities of the model are reported, or rules besides the grammar could forbid one.
        """
        if self.grammar is None or self.rules is not None or self.params.logprobs is not None:
            return []
        return self.grammar.forced(token)

    @property
    def _knows_end(self) -> bool:
        return self.grammar is not None and self.grammar.knows_end

    def _too_early(self, position: int) -> tuple[int, ...]:
        return tuple(sorted(self.stop_ids)) if position < self.params.min_tokens else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The token sampled for one `SampleRow`."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Fault(Enum):
    """What is to blame for a row without a token."""

    #: The model, its weights or the hardware: the logits have no finite maximum.
    LOGITS = auto()
    #: This server: the row could not be prepared.
    PREPARATION = auto()
    #: The request: what it allows leaves no token, or takes too long to find.
    REQUEST = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """The reason why no token could be sampled; other rows are not affected."""

    reason: str
    fault: Fault = Fault.LOGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelayed:
    """No token could be sampled yet: the same row is to be computed again."""


DELAYED = SampleDelayed()
SampleResult = Sampled | SampleFailure | SampleDelayed


def unprepared(error: Exception) -> SampleFailure:
    """The result of a row whose preparation has raised `error`, which the caller logs."""
    if isinstance(error, GrammarFailed):
        fault = Fault.PREPARATION if isinstance(error, GrammarMismatch) else Fault.REQUEST
        return SampleFailure(reason=f"its grammar cannot be followed: {error}", fault=fault)
    name = type(error).__name__
    return SampleFailure(reason=f"its part of a step could not be prepared ({name})", fault=Fault.PREPARATION)


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A token stream. Mutable, owned by one scheduler.

        tokens       | prompt ........ | output ....... |
        KV           | computed ............... | pending: the next rows to compute |
        block_table  | full, registered | ... | partial | unused |

    Tokens and block table are arrays of machine integers, because batch building copies whole memory ranges of them.
    Both only grow. Any other change of the block table makes a new array (`BlockManager`), so that a mirror of the
    table can detect it. Blocks behind a window are released, but their entries stay in the table: nothing reads them.
    """

    request_id: RequestId
    choice_index: int
    params: SamplingParams
    hash_key: bytes
    #: Prompt and output token ids.
    tokens: array[int]
    num_prompt: int
    #: Hashes of the first full blocks of `tokens`; the others have not been needed yet.
    hashes: list[BlockHash] = field(default_factory=list)
    #: Table of the layout's first KV group.
    block_table: array[int] = field(default_factory=lambda: array("q"))
    #: Tables of the other KV groups, each as long as `block_table`; empty while the sequence holds no blocks.
    other_tables: tuple[array[int], ...] = ()
    #: Entries at the head of each KV group's table whose blocks are not held; empty: all blocks are held.
    num_dropped: tuple[int, ...] = ()
    #: Slots `[num_computed, num_slots)` exist, and only this sequence writes to them.
    num_slots: int = 0
    #: Tokens whose KV is stored in the block table.
    num_computed: int = 0
    #: The last of the tokens, which a grammar has forced behind the last one that was sampled.
    num_forced: int = 0
    #: Blocks of each table that were registered with the pool for reuse, if they were held.
    num_registered: int = 0
    #: Position in the order of admission; the oldest has the smallest.
    admission_order: int = 0
    #: Computed in steps without other requests.
    is_alone: bool = False
    #: Computed only in what the ITL budget of other requests leaves.
    is_best_effort: bool = False
    #: What each token of the prompt gives is wanted, so that no cached block spares the computing of any.
    is_scored: bool = False
    #: What the output may consist of; None: anything.
    grammar: OutputGrammar | None = None
    #: What the request says of tokens; None: nothing.
    rules: TokenRules | None = None
    #: Inputs of sampling, once the sequence is a choice; None for a bare prompt.
    sampling: SampleRow | None = None

    @classmethod
    def from_prompt(
        cls,
        request_id: RequestId,
        prompt: Items[int],
        params: SamplingParams,
        *,
        hash_key: bytes,
        hashes: Items[BlockHash] = (),
    ) -> Sequence:
        """A sequence before its first token; `hashes` are those of the prompt's first full blocks, as far as known."""
        return cls(
            request_id=request_id,
            choice_index=0,
            params=params,
            hash_key=hash_key,
            tokens=array("q", prompt),
            num_prompt=len(prompt),
            hashes=list(hashes),
            rules=TokenRules.of(params),
        )

    @property
    def id(self) -> SequenceId:
        """Unique on this worker."""
        return sequence_id(self.request_id, self.choice_index)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Tokens of the completion, and so the index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a decoding sequence."""
        return len(self.tokens) - self.num_computed

    @property
    def tables(self) -> tuple[array[int], ...]:
        """The block table of each KV group."""
        return (self.block_table, *self.other_tables)

    def dropped(self, group: int) -> int:
        """Entries at the head of a KV group's table whose blocks are not held."""
        return self.num_dropped[group] if self.num_dropped else 0

    def held_blocks(self) -> Iterator[BlockId]:
        """All blocks that the sequence holds, from the last token's to the first's."""
        if not self.other_tables and not self.num_dropped:
            yield from map(BlockId, reversed(self.block_table))
            return
        tables = [(table, self.dropped(group)) for group, table in enumerate(self.tables)]
        for index in reversed(range(len(self.block_table))):
            for table, num_dropped in tables:
                if index >= num_dropped:
                    yield BlockId(table[index])

    def hash_full_blocks(self, block_size: int) -> list[BlockHash]:
        """Hashes of all full blocks of `tokens`; computes only those that are not known yet."""
        if len(self.hashes) < len(self.tokens) // block_size:
            self.hashes = hash_blocks(self.hash_key, self.tokens, block_size, self.hashes)
        return self.hashes
