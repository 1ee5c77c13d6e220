"""The C++ decoder's Python interface: passes tensors as addresses, and asserts what the C++ code relies on."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.sampling import NativeSampler, RowSampler
from kernels.decoder import (
    DecoderShape,
    DecoderWeights,
    Interrupt,
    LayerListener,
    LayerWeights,
    PassInterrupted,
)
from kernels.ops import KvRows

#: Numbers shared with `src/module.cpp`: types in memory, and formats of packed weights.
TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
FORMATS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 1}
INT8 = 2
#: Columns of a panel, weights of a group of codes (`src/kernels.h`), and the instruction sets that read codes.
_PANEL_COLUMNS, _CODE_DEPTH, _CODED = 32, 8, ("avx512", "avx512_bf16")
#: `kMaxWidth` and `kMaxHeadDim` of `src/isa/rows.h`.
MAX_HIDDEN_SIZE, MAX_HEAD_DIM = 1 << 15, 1024
#: Depth from which on sums of byte products do not fit 32 bits.
MAX_INT8_DEPTH = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowing:
    """Cores of other processes that threads of this one may use while they are idle."""

    #: A `CoreLease` (`src/threads.h`) for each CPU, in memory that all these processes map.
    leases: mmap.mmap
    #: The number of this process as a borrower; not 0.
    borrower: int
    #: Cores that may be borrowed, in order of preference. At most as many at a time as there are own threads.
    cpus: tuple[int, ...]
    #: How long to avoid a core that other programs turned out to use, although its owner does not.
    stay_away_s: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """The threads of a decoder. Their number changes no bit."""

    #: Number of own threads.
    count: int
    #: Core of each own thread; empty: not pinned.
    cpus: tuple[int, ...] = ()
    #: Cores that more threads may use.
    borrowing: Borrowing | None = None


class ThreadCounters(Protocol):
    """How the threads of a decoder shared its work, since it was made."""

    @property
    def borrowed_core_seconds(self) -> float:
        """Processor time on borrowed cores."""

    @property
    def redone_units(self) -> int:
        """Units of work computed again because the thread that had claimed them lost its core."""


class _NativeDecoder(NativeSampler, Protocol):
    """The methods of `_native.Decoder`, which has no type hints."""

    logits_stride: int
    weight_bytes: int
    num_threads: int
    borrowed_core_seconds: float
    redone_units: int

    def add_layer(self, **weights: object) -> None: ...
    def finish(self, **weights: object) -> None: ...
    def forward(self, *numbers: int) -> bool: ...


class NativeModule(Protocol):
    """`kernels.cpu._native`."""

    def instruction_sets(self) -> list[str]:
        """Instruction sets of this machine, best first."""

    def Decoder(self, **shape: object) -> _NativeDecoder: ...  # noqa: N802 - a class


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCode:
    """The C++ code that a decoder runs."""

    module: NativeModule
    #: One of the module's `instruction_sets()`.
    instruction_set: str
    #: Weights are rounded to 8 bits.
    int8: bool


def unsupported(shape: DecoderShape, *, int8: bool) -> str | None:
    """Why the C++ kernels cannot run a decoder of that shape; None when they can."""
    if shape.hidden_size > MAX_HIDDEN_SIZE:
        return f"hidden_size {shape.hidden_size} is above {MAX_HIDDEN_SIZE}"
    if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 2:
        return f"head_dim {shape.head_dim} is odd or above {MAX_HEAD_DIM}"
    depth = max(shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim)
    if int8 and depth > MAX_INT8_DEPTH:
        return f"sums of {depth} int8 products are above {MAX_INT8_DEPTH}"
    return None


def packed_size(shape: DecoderShape, dtype: torch.dtype, *, int8: bool, instruction_set: str) -> int:
    """Bytes that the packed copies of all matrices will take (`src/pack.cpp`).

    Approximate with codes: weights without a code are stored uncompressed as well.
    """
    itemsize = 1 if int8 else 2 if FORMATS[dtype] == FORMATS[torch.bfloat16] else 4
    coded = dtype == torch.bfloat16 and not int8 and instruction_set in _CODED

    def matrix(rows: int, depth: int, multiple: int = _PANEL_COLUMNS) -> int:
        size = -(-rows // multiple) * multiple * (-(-depth * itemsize // 4) * 4)
        return size * 3 // 4 if coded and depth % _CODE_DEPTH == 0 else size

    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    layer = (
        matrix(heads + 2 * shape.num_kv_heads * shape.head_dim, hidden)
        + matrix(hidden, heads)
        # Gate and up are interleaved.
        + 2 * matrix(inner, hidden, _PANEL_COLUMNS // 2)
        + matrix(hidden, inner)
    )
    return len(shape.windows) * layer + matrix(shape.vocab_size, hidden)


class CpuDecoder:
    """Implements `kernels.decoder.DecoderKernel` and `ThreadCounters` with packed copies of the weights."""

    def __init__(
        self, shape: DecoderShape, weights: DecoderWeights, cos_sin: Tensor, *, code: NativeCode, threads: Threads
    ) -> None:
        """`cos_sin`: float32 [max_positions, 2, head_dim]."""
        dtype = weights.norm.dtype
        self._vocab_size = shape.vocab_size
        self._hidden_size = shape.hidden_size
        self._kv_type = TYPES[dtype]
        # Read in place, so they must live as long as the decoder.
        self._embedding = weights.embedding.contiguous()
        self._cos_sin = cos_sin.contiguous()
        self._decoder = _new_decoder(shape, dtype, code, threads)
        for layer, window in zip(weights.layers, shape.windows, strict=True):
            _add_layer(self._decoder, layer, window)
        held = [weights.norm.contiguous(), weights.lm_head.contiguous()]
        self._decoder.finish(
            embedding=self._embedding.data_ptr(),
            norm=held[0].data_ptr(),
            lm_head=(held[1].data_ptr(), 0, shape.vocab_size, shape.hidden_size),
            angles=self._cos_sin.data_ptr(),
        )
        self._logits = torch.empty(0, self._decoder.logits_stride)
        self._current_logits = self._logits[:, : shape.vocab_size]

        self.interrupt = Interrupt()
        #: Samples with the decoder's threads. Not during a forward pass.
        self.row_sampler = RowSampler(self._decoder)

    @property
    def borrowed_core_seconds(self) -> float:
        return self._decoder.borrowed_core_seconds

    @property
    def redone_units(self) -> int:
        return self._decoder.redone_units

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    def forward(
        self,
        token_ids: Tensor,
        rows: KvRows,
        logits_rows: Tensor,
        kv_cache: Tensor,
        on_layer: LayerListener | None = None,
        *,
        hidden_only: bool = False,
    ) -> Tensor:
        indices = (token_ids, *_indices(rows), logits_rows)
        self._check(indices, kv_cache)
        num_logits = len(logits_rows)
        out = self._hidden(num_logits) if hidden_only else self._reserve(num_logits)
        block, layer, kv, head, _, _ = kv_cache.stride()
        is_complete = self._decoder.forward(
            len(token_ids),
            len(rows.context_lens),
            num_logits,
            rows.block_tables.stride(0),
            *(tensor.data_ptr() for tensor in indices),
            kv_cache.data_ptr(),
            self._kv_type,
            block,
            layer,
            kv,
            head,
            kv_cache.shape[4],
            out.data_ptr(),
            out.stride(0),
            hidden_only,
            self.interrupt.address,
        )
        if not is_complete:
            raise PassInterrupted
        return out

    def _check(self, indices: tuple[Tensor, ...], kv_cache: Tensor) -> None:
        assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in indices)
        assert kv_cache.is_contiguous()
        assert TYPES[kv_cache.dtype] == self._kv_type

    def _hidden(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self._hidden_size)

    def _reserve(self, num_logits: int) -> Tensor:
        """Memory for logits, kept with its views: new memory costs page faults, and a view 0.1 ms with cold caches."""
        if num_logits > len(self._logits):
            self._logits = torch.empty(num_logits, self._decoder.logits_stride)
        if num_logits != len(self._current_logits):
            self._current_logits = self._logits[:num_logits, : self._vocab_size]
        return self._current_logits


def _indices(rows: KvRows) -> tuple[Tensor, ...]:
    return rows.positions, rows.slot_mapping, rows.query_starts, rows.context_lens, rows.block_tables


def _new_decoder(shape: DecoderShape, dtype: torch.dtype, code: NativeCode, threads: Threads) -> _NativeDecoder:
    borrowing = threads.borrowing
    leases = None if borrowing is None else torch.frombuffer(borrowing.leases, dtype=torch.int32)
    return code.module.Decoder(
        isa=code.instruction_set,
        weight_type=TYPES[dtype],
        format=INT8 if code.int8 else FORMATS[dtype],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
        eps=shape.rms_norm_eps,
        num_threads=threads.count,
        cpus=list(threads.cpus),
        memory=leases,
        core_leases=0 if leases is None else leases.data_ptr(),
        borrower=0 if borrowing is None else borrowing.borrower,
        borrow_cpus=[] if borrowing is None else list(borrowing.cpus),
        stay_away_s=0.0 if borrowing is None else borrowing.stay_away_s,
    )


def _add_layer(decoder: _NativeDecoder, layer: LayerWeights, window: int | None) -> None:
    held: list[Tensor] = []

    def address(tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        held.append(tensor.contiguous())
        return held[-1].data_ptr()

    def matrix(weight: Tensor, bias: Tensor | None) -> tuple[int, int, int, int]:
        return address(weight), address(bias), weight.shape[0], weight.shape[1]

    decoder.add_layer(
        q=matrix(layer.q, layer.q_bias),
        k=matrix(layer.k, layer.k_bias),
        v=matrix(layer.v, layer.v_bias),
        output=matrix(layer.output, layer.output_bias),
        gate=matrix(layer.gate, layer.gate_bias),
        up=matrix(layer.up, layer.up_bias),
        down=matrix(layer.down, layer.down_bias),
        input_norm=address(layer.input_norm),
        post_attention_norm=address(layer.post_attention_norm),
        q_norm=address(layer.q_norm),
        k_norm=address(layer.k_norm),
        window=window or 0,
    )
