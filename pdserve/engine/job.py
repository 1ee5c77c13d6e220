"""A prompt as a router sends it: the fields that the jobs of both tiers share. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from pdserve.base.errors import NoFreeBlocks
from pdserve.base.ids import NO_ROUTER, BlockHash, RequestId, RouterId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence, SequenceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """One prompt, and how the tokens that follow it are sampled."""

    request_id: RequestId
    prompt_token_ids: Items[int]
    params: SamplingParams
    #: Key of the block hashes; carries the tenant's salt.
    hash_key: bytes
    #: Hashes of the first full blocks, if they are known; spares the step thread the work.
    hashes: Items[BlockHash] = ()
    #: Router that sent the prompt.
    router_id: RouterId = NO_ROUTER
    #: Computed in steps without other requests.
    is_alone: bool = False

    def new_sequence(self) -> Sequence:
        """The prompt as a sequence that holds no blocks yet."""
        sequence = Sequence.from_prompt(
            self.request_id, self.prompt_token_ids, self.params, hash_key=self.hash_key, hashes=self.hashes
        )
        sequence.is_alone = self.is_alone
        return sequence

    def require_servable(self, limits: SequenceLimits, pool: BlockPool, *, num_output_tokens: int) -> None:
        """Raises `RequestError` for a prompt that the model cannot take.

        Raises `NoFreeBlocks` if an empty pool could not hold the prompt and `num_output_tokens` after it.
        """
        limits.check(self.prompt_token_ids, self.params)
        num_tokens = len(self.prompt_token_ids)
        needed = pool.blocks_of_all_groups_for(num_tokens + num_output_tokens)
        if needed > pool.num_blocks:
            output = f" and {num_output_tokens} of output" if num_output_tokens else ""
            raise NoFreeBlocks(
                f"Request {self.request_id} needs {needed} KV blocks for {num_tokens} prompt tokens{output}, but this "
                f"worker has {pool.num_blocks} in all. Shorten the prompt, or set a larger --kv-cache-memory."
            )
