"""The model of the simulation: a token is a function of the whole context, which is read back from the KV blocks.

The KV of a token depends on the token, its position and the KV of the token before it. A sampled token depends on the
KV of all tokens, in the order of the block table. A wrong, stale or overwritten block therefore becomes a wrong token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.base.layout import KvLayout
from pdserve.base.sampling import FinishReason, SamplingParams, TokenLogprobs
from pdserve.model.grammar import TokenBits
from tests.simulation.vocabulary import EOS, VOCAB_SIZE, output_state

MASK = (1 << 64) - 1
MAX_MODEL_LEN = 160
BLOCK_SIZE = 4
#: A block has 8 bytes per token and layer.
LAYOUT = KvLayout.uniform(
    model="simulated", dtype="float32", block_size=BLOCK_SIZE, num_layers=2, num_kv_heads=1, head_dim=1
)

_weights = np.random.default_rng(7).integers(1, 1 << 63, (MAX_MODEL_LEN + BLOCK_SIZE) * 2, np.uint64) | np.uint64(1)


def mixed(x: int) -> int:
    """A 64-bit hash of a number. Source: the finalizer of SplitMix64, Steele et al. 2014."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def kv_of(before: int, token: int, position: int) -> int:
    """KV of one token in the first layer, from that of the token before it."""
    return mixed(before ^ (token * 0xD6E8FEB86659FD93 + position))


def upper_layer(kv: int) -> int:
    """The same token in the second layer."""
    return (kv * 0xA24BAED4963EE407 + 1) & MASK


def state_of(rows: npt.NDArray[np.uint64], num_tokens: int) -> int:
    """What is sampled from. `rows`: uint64 [2, tokens], both layers."""
    weights = _weights[: 2 * num_tokens]
    with np.errstate(over="ignore"):
        lower = (rows[0, :num_tokens] * weights[:num_tokens]).sum(dtype=np.uint64)
        upper = (rows[1, :num_tokens] * weights[num_tokens:]).sum(dtype=np.uint64)
    return mixed(int(lower) ^ (int(upper) << 1 & MASK))


def sampling_key(params: SamplingParams, choice: int, position: int) -> int:
    """What the sampled token depends on besides its context."""
    if params.temperature == 0:
        return int(1000 * (params.repetition_penalty + params.presence_penalty + params.frequency_penalty))
    noise = mixed(params.seed ^ mixed(choice << 32 | position))
    return noise ^ int(1e6 * params.temperature) ^ int(1e6 * params.top_p) ^ params.top_k << 40


def sample(
    state: int,
    params: SamplingParams,
    choice: int,
    position: int,
    stop_ids: Sequence[int],
    allowed: TokenBits | None,
) -> int:
    """The token at `position` of a completion. `allowed`: as `SampleRow.allowed` gives it, `min_tokens` included."""
    token = mixed(state ^ sampling_key(params, choice, position)) % VOCAB_SIZE
    if allowed is not None:
        while not allowed[token // 32] >> np.uint32(token % 32) & 1:
            token = (token + 1) % VOCAB_SIZE
        return token
    while position < params.min_tokens and token in stop_ids:
        token = (token + 1) % VOCAB_SIZE
    return token


def logprobs_of(state: int, token: int, count: int) -> TokenLogprobs:
    """Numbers that only this context has."""
    numbers = [-(mixed(state + index) % 1000) / 64 for index in range(count + 1)]
    top = tuple(mixed(state ^ index) % VOCAB_SIZE for index in range(count))
    return TokenLogprobs(logprob=numbers[0], rank=1 + token, top_ids=top, top_logprobs=tuple(numbers[1:]))


class Expected:
    """What a choice must be, from the prompt alone: no blocks, no workers, and a text that is followed once."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, choice: int) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason = FinishReason.LENGTH
        stop_ids = tuple(params.stop_token_ids) + (() if params.ignore_eos and not params.grammar else (EOS,))
        follows = output_state(params)
        rows = np.zeros((2, len(prompt) + params.max_tokens), np.uint64)
        kv = 0
        tokens = array("q", prompt)
        for position, token in enumerate(tokens):
            kv = self._write(rows, kv, token, position)
        while len(self.token_ids) < params.max_tokens:
            state = state_of(rows, len(tokens))
            position = len(self.token_ids)
            early = stop_ids if follows is not None and follows.knows_end and position < params.min_tokens else ()
            allowed = None if follows is None else follows.allowed(tokens, len(prompt), early)
            token = sample(state, params, choice, position, stop_ids, allowed)
            self.token_ids.append(token)
            if params.logprobs is not None:
                self.logprobs.append(logprobs_of(state, token, params.logprobs))
            if token in stop_ids:
                self.finish_reason = FinishReason.STOP
                return
            if len(tokens) + 1 >= MAX_MODEL_LEN:
                return
            kv = self._write(rows, kv, token, len(tokens))
            tokens.append(token)

    @staticmethod
    def _write(rows: npt.NDArray[np.uint64], before: int, token: int, position: int) -> int:
        kv = kv_of(before, token, position)
        rows[0, position], rows[1, position] = kv, upper_layer(kv)
        return kv
