"""One token stream on this worker: its tokens, its block table, how far its KV is computed; and when it ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import RequestError
from pdserve.base.ids import BlockHash, RequestId, SequenceId, sequence_id
from pdserve.base.sampling import MAX_N, ChoiceTokens, FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """How the token after `tokens` is sampled; made once for a choice, whose array of tokens grows.

    The token depends on nothing but these fields and its row of logits.
    """

    params: SamplingParams
    choice_index: int
    #: Prompt and output so far; the sequence's own.
    tokens: array[int]
    num_prompt: int
    #: Ids that end the choice.
    stop_ids: frozenset[int] = frozenset()
    #: The token is the most likely one, and nothing more is to be told of it.
    is_argmax: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        is_plain = params.temperature == 0 and params.logprobs is None and params.min_tokens == 0
        object.__setattr__(self, "is_argmax", is_plain and not params.logit_bias and not self.penalizes)

    @property
    def position(self) -> int:
        """Index of the token within the completion."""
        return len(self.tokens) - self.num_prompt

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that may not be chosen."""
        return self.banned_at(self.position)

    @property
    def penalizes(self) -> bool:
        """Whether tokens so far make the same tokens less or more likely."""
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    def banned_at(self, position: int) -> tuple[int, ...]:
        """Ids that may not be chosen there: before `min_tokens` nothing may end the choice."""
        return tuple(sorted(self.stop_ids)) if position < self.params.min_tokens else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The token chosen for one `SampleRow`."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Why no token could be chosen; concerns this row only."""

    reason: str


SampleResult = Sampled | SampleFailure


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Mutable, owned by one scheduler.

        tokens       | prompt ........ | output ....... |
        KV           | computed ............... | pending: the next rows to compute |
        block_table  | full, registered | ... | partial | room |

    Arrays of machine integers, because batch building copies them as whole memory ranges. `tokens` and `block_table`
    only grow; whatever else changes the block table makes a new array (`BlockManager`), which a mirror of it can see.
    """

    request_id: RequestId
    choice_index: int
    params: SamplingParams
    hash_key: bytes
    #: Prompt and output token ids.
    tokens: array[int]
    num_prompt: int
    #: Hashes of the first full blocks of `tokens`, as far as they were needed.
    hashes: list[BlockHash] = field(default_factory=list)
    block_table: array[int] = field(default_factory=lambda: array("q"))
    #: Slots `[num_computed, num_slots)` exist and are the sequence's own to write.
    num_slots: int = 0
    #: Tokens whose KV is stored in the block table.
    num_computed: int = 0
    #: Blocks of the table that were offered to the pool for reuse.
    num_registered: int = 0
    #: Order of becoming active; smaller is older.
    admission_order: int = 0
    #: How the next token is drawn, once the sequence is a choice; None for a bare prompt.
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
        """A sequence before its first token; `hashes` are those of the prompt's first full blocks, if already known."""
        return cls(
            request_id=request_id,
            choice_index=0,
            params=params,
            hash_key=hash_key,
            tokens=array("q", prompt),
            num_prompt=len(prompt),
            hashes=list(hashes),
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
        """Tokens of the completion; the index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a sequence that is decoding."""
        return len(self.tokens) - self.num_computed

    def hash_full_blocks(self, block_size: int) -> list[BlockHash]:
        """Hashes of all full blocks of the tokens so far; computes only those not computed before."""
        if len(self.hashes) < len(self.tokens) // block_size:
            self.hashes = hash_blocks(self.hash_key, self.tokens, block_size, self.hashes)
        return self.hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimits:
    """What the model and the worker allow every sequence."""

    #: Prompt and output tokens together.
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()

    def check(self, prompt: Items[int], params: SamplingParams) -> None:
        """Raises `RequestError` for what would break a step: nothing of the request has been stored yet."""
        if not prompt:
            raise RequestError("The prompt has no tokens; send at least one.", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; this model takes {self.max_model_len}, one of them for output. "
                "Shorten the prompt.",
                param="prompt",
            )
        if not 1 <= params.n <= MAX_N:
            raise RequestError(f"n is {params.n}, must be between 1 and {MAX_N}.", param="n")
        if params.max_tokens < 1:
            raise RequestError(f"max_tokens is {params.max_tokens}, must be at least 1.", param="max_tokens")
        for name, ids in (
            ("prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                raise RequestError(f"{name} has token ids outside of 0 .. {self.vocab_size - 1}.", param=name)

    def check_first_tokens(self, tokens: Items[int], params: SamplingParams) -> None:
        """Raises `RequestError` unless there is one possible token per choice."""
        if len(tokens) != params.n or not all(0 <= token < self.vocab_size for token in tokens):
            raise RequestError(
                f"Need one first token for each of {params.n} choices, each within 0 .. {self.vocab_size - 1}; "
                f"got {len(tokens)}.",
                param="first_tokens",
            )

    def choice_tokens(self, sequence: Sequence, choice_index: int, sampled: Sampled) -> ChoiceTokens:
        """Describe the token that follows the present ones, and whether it ends the choice; changes nothing."""
        token, params, num_tokens = sampled.token_id, sequence.params, len(sequence.tokens)
        index = num_tokens - sequence.num_prompt
        reason: FinishReason | None = None
        if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
            reason = FinishReason.STOP
        elif self._is_last(params, index, num_tokens):
            reason = FinishReason.LENGTH
        return ChoiceTokens(
            choice_index=choice_index,
            first_index=index,
            token_ids=(token,),
            logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
            finish_reason=reason,
            stop_token_id=token if reason is FinishReason.STOP else None,
        )

    def can_go_ahead(self, sequence: Sequence) -> bool:
        """Whether the token after the next can be drawn without a word to the host, if the next does not end it."""
        row = sequence.sampling
        return row is not None and not self._is_last(row.params, row.position, len(row.tokens))

    def sample_row(self, sequence: Sequence, choice_index: int) -> SampleRow:
        """What is needed to sample the token that follows the sequence's present ones, now and later."""
        return SampleRow(
            params=sequence.params,
            choice_index=choice_index,
            tokens=sequence.tokens,
            num_prompt=sequence.num_prompt,
            stop_ids=self.stops_at(sequence.params),
        )

    def stops_at(self, params: SamplingParams) -> frozenset[int]:
        """Token ids that end a sequence; none of them may be sampled before `min_tokens`."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self.eos_token_ids

    def _is_last(self, params: SamplingParams, index: int, num_tokens: int) -> bool:
        """Whether the output's token `index`, which comes after `num_tokens`, is the last, whatever it is."""
        return index + 1 >= params.max_tokens or num_tokens + 1 >= self.max_model_len
