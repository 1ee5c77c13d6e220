"""A prompt as a router sends it: the fields that the jobs of both tiers share, and how it queues. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, TypeVar

from pdserve.base.errors import NoFreeBlocks
from pdserve.base.ids import NO_ROUTER, AttemptId, BlockHash, RequestId, RouterId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.model.thinking import OutputGrammar

#: Prompt tokens of one step behind which logits are computed: a row has the vocabulary's size.
MAX_SCORED_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """One prompt, and how the tokens that follow it are sampled."""

    request_id: RequestId
    prompt_token_ids: Items[int]
    params: SamplingParams
    #: `params.grammar`, once it was read, with `params.thinking`.
    grammar: OutputGrammar | None = None
    #: Key of the block hashes; carries the tenant's salt.
    hash_key: bytes
    #: Hashes of the first full blocks, if they are known; spares the step thread the work.
    hashes: Items[BlockHash] = ()
    #: Router that sent the prompt.
    router_id: RouterId = NO_ROUTER
    #: Computed in steps without other requests.
    is_alone: bool = False
    #: Computed only in what the ITL budget of other requests leaves. They come first in every queue.
    is_best_effort: bool = False
    #: When its router first gave it to a worker, on this worker's clock. One that has lost a worker keeps its turn.
    arrived_at: float = 0.0
    #: Number of the attempt, a fence: events of this one reach no other.
    attempt: int = 0

    @property
    def turn(self) -> tuple[bool, float]:
        """Its position in a queue."""
        return self.is_best_effort, self.arrived_at

    @property
    def attempt_id(self) -> AttemptId:
        """What the job's events are for."""
        return AttemptId(self.request_id, self.attempt)

    def new_sequence(self) -> Sequence:
        """The prompt as a sequence that holds no blocks yet."""
        sequence = Sequence.from_prompt(
            self.request_id, self.prompt_token_ids, self.params, hash_key=self.hash_key, hashes=self.hashes
        )
        sequence.is_alone, sequence.is_best_effort = self.is_alone, self.is_best_effort
        sequence.grammar = self.grammar
        return sequence

    def require_servable(self, limits: SequenceLimits, pool: BlockPool, *, num_output_tokens: int) -> None:
        """Raises `RequestError` for a prompt that the model cannot take.

        Raises `NoFreeBlocks` if an empty pool could not hold the prompt and `num_output_tokens` after it.
        """
        assert self.params.follows_text == (self.grammar is not None), "a grammar is read before its job is made"
        limits.check(self.prompt_token_ids, self.params)
        num_tokens = len(self.prompt_token_ids)
        needed = pool.blocks_of_all_groups_for(num_tokens + num_output_tokens)
        if needed > pool.num_blocks:
            output = f" and {num_output_tokens} of output" if num_output_tokens else ""
            raise NoFreeBlocks(
                f"Request {self.request_id} needs {needed} KV blocks for {num_tokens} prompt tokens{output}, but this "
                f"worker has {pool.num_blocks} in all. Shorten the prompt, or set a larger --kv-cache-memory."
            )


class QueuedRequest(Protocol):
    """A request in a queue of a worker."""

    @property
    def job(self) -> PromptJob:
        """What was requested."""
        ...


Q = TypeVar("Q", bound=QueuedRequest)


def queue_by_arrival(queue: dict[RequestId, Q], request: Q) -> None:
    """Add a request behind those that have arrived before it or with it. `queue` is in order of `PromptJob.turn`."""
    job = request.job
    younger = list(takewhile(lambda each: each.job.turn > job.turn, reversed(queue.values())))
    queue[job.request_id] = request
    for each in reversed(younger):
        queue[each.job.request_id] = queue.pop(each.job.request_id)
