"""Sampling of rows by the C++ threads: requests and results as memory that `src/sample_row.h` lays out."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: `kMaxAlternatives`.
MAX_ALTERNATIVES = 20

#: The fields of `SampleRequest` up to `num_alternatives`, and the others.
_SETTINGS = Struct("=qdddqQqqq")
_EDITS = Struct("=qqqqqqdddqqq")
_REQUEST_BYTES = _SETTINGS.size + _EDITS.size
_NO_EDITS = bytes(_EDITS.size)
#: Fields of `SampleResult`.
_TOKEN, _RANK, _LOGPROB, _LOG_TOTAL, _NUM_TOP, _TOP_IDS = range(6)
_TOP_LOGPROBS = _TOP_IDS + MAX_ALTERNATIVES
_RESULT_FIELDS = _TOP_LOGPROBS + MAX_ALTERNATIVES
_SEED_MASK = 2**64 - 1


class NativeSampler(Protocol):
    """`_native.Decoder` and `_native.Machine`, as far as they sample."""

    def sample(self, requests: int, count: int, logits: int, stride: int, vocab_size: int, results: int) -> None:
        """All addresses are those of memory of the C++ types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Changes to a row of logits before sampling, in this order. All ids are below the vocabulary's size."""

    #: Added to the logits of these ids.
    bias: Mapping[int, float]
    #: Prompt and output; None: no penalties. Not copied: it must not change during the call.
    tokens: array[int] | None
    num_prompt: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    #: Ids that must not be sampled.
    banned: Sequence[int]
    #: Bit i % 32 of word i // 32 says whether id i may be sampled, for the whole vocabulary; None: all may. Not copied.
    allowed: npt.NDArray[np.uint32] | None = None


@dataclass(slots=True, kw_only=True)  # Not frozen: every step makes one per row, and freezing takes longer.
class SampleRequest:
    """A row to sample; `pdserve.base.sampling.SamplingParams` has the meaning of the settings."""

    #: Index of the row of logits.
    row: int
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    #: 64 bits, signed or not.
    seed: int
    choice: int
    position: int
    #: At most `MAX_ALTERNATIVES`; None: no log-probabilities.
    num_alternatives: int | None = None
    edits: Edits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """Log-probability and rank of a sampled token by the raw logits, and the likeliest tokens."""

    logprob: float
    rank: int
    #: Logarithm of the sum of all exponentials.
    log_total: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True, kw_only=True)
class PackedRequest:
    """A request as memory. `held` is memory whose addresses it has."""

    fields: bytes
    held: list[array[int] | array[float] | npt.NDArray[np.uint32] | None]


def pack(request: SampleRequest) -> PackedRequest:
    """Raises an error of any kind when a field does not fit."""
    assert request.row >= 0
    assert request.num_alternatives is None or 0 <= request.num_alternatives <= MAX_ALTERNATIVES
    settings = _SETTINGS.pack(
        request.row,
        request.temperature,
        request.top_p,
        request.min_p,
        request.top_k,
        request.seed & _SEED_MASK,
        request.choice,
        request.position,
        -1 if request.num_alternatives is None else request.num_alternatives,
    )
    if request.edits is None:
        return PackedRequest(fields=settings + _NO_EDITS, held=[])
    edits, held = _pack_edits(request.edits)
    return PackedRequest(fields=settings + edits, held=held)


class RowSampler:
    """Samples rows on a group of threads, each row by one of them. One call at a time."""

    def __init__(self, native: NativeSampler) -> None:
        self._native = native
        self._reserve(64)

    def sample(self, logits: Tensor, requests: Sequence[PackedRequest]) -> list[int]:
        """The token of each request; -1: its row of logits has no finite maximum.

        logits: float32 [num_logits, vocab], rows contiguous, not modified. The requests' rows are below `num_logits`.
        """
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        count = len(requests)
        if count > self._capacity:
            self._reserve(count)
        self._requests[: count * _REQUEST_BYTES] = b"".join([request.fields for request in requests])
        self._native.sample(
            self._address, count, logits.data_ptr(), logits.stride(0), logits.shape[1], self._results.data_ptr()
        )
        tokens: list[int] = self._results[:count, _TOKEN].tolist()
        return tokens

    def alternatives(self, index: int) -> Alternatives:
        """Log-probabilities of a request of the last call, which had `num_alternatives` and got a token."""
        fields = self._results[index].tolist()
        floats = self._results[index].view(torch.float64).tolist()
        count = fields[_NUM_TOP]
        return Alternatives(
            logprob=floats[_LOGPROB],
            rank=fields[_RANK],
            log_total=floats[_LOG_TOTAL],
            top_ids=fields[_TOP_IDS : _TOP_IDS + count],
            top_logprobs=floats[_TOP_LOGPROBS : _TOP_LOGPROBS + count],
        )

    def _reserve(self, count: int) -> None:
        self._capacity = count
        self._requests = bytearray(count * _REQUEST_BYTES)
        # Shares the memory, and keeps it from being moved.
        self._shared = torch.frombuffer(self._requests, dtype=torch.uint8)
        self._address = self._shared.data_ptr()
        self._results = torch.empty(count, _RESULT_FIELDS, dtype=torch.int64)


def _pack_edits(edits: Edits) -> tuple[bytes, list[array[int] | array[float] | npt.NDArray[np.uint32] | None]]:
    bias = bias_ids = banned = None
    if edits.bias:
        bias, bias_ids = array("f", edits.bias.values()), array("q", edits.bias)
    if edits.banned:
        banned = array("q", edits.banned)
    tokens, num_tokens = (0, 0) if edits.tokens is None else edits.tokens.buffer_info()
    packed = _EDITS.pack(
        0 if bias is None else bias.buffer_info()[0],
        0 if bias_ids is None else bias_ids.buffer_info()[0],
        len(edits.bias),
        tokens,
        num_tokens,
        edits.num_prompt,
        edits.repetition_penalty,
        edits.presence_penalty,
        edits.frequency_penalty,
        0 if banned is None else banned.buffer_info()[0],
        len(edits.banned),
        0 if edits.allowed is None else edits.allowed.ctypes.data,
    )
    return packed, [bias, bias_ids, banned, edits.allowed]
