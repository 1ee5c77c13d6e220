"""The C++ kernels one by one, with checked arguments, for tests and benchmarks. The decoder calls them from C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.cpu.decoder import FORMATS, INT8, MAX_HEAD_DIM, MAX_HIDDEN_SIZE, TYPES
from kernels.ops import KvRows

#: Values in a unit of 32 bits, by format.
_PER_UNIT = {TYPES[torch.bfloat16]: 2, TYPES[torch.float32]: 1, INT8: 4}


class _NativePacked(Protocol):
    """`_native.Packed`."""

    columns: int
    bytes: int


class _NativeMachine(Protocol):
    """`_native.Machine`; `src/ops.cpp` describes the arguments."""

    def multiply(self, *arguments: object) -> None: ...
    def to_rows(self, *arguments: object) -> None: ...
    def norm(self, *arguments: object) -> None: ...
    def rotate(self, *arguments: object) -> None: ...
    def attend(self, *arguments: object) -> None: ...
    def read(self, address: int, num_bytes: int) -> int: ...


class _NativeOps(Protocol):
    """The functions of `kernels.cpu._native` used here."""

    def pack(
        self,
        matrices: list[tuple[int, int, int, int]],
        weight_type: int,
        weight_format: int,
        interleave: bool,
        isa: str,
    ) -> _NativePacked: ...

    def Machine(self, isa: str, num_threads: int, cpus: list[int]) -> _NativeMachine: ...  # noqa: N802 - a class


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """Weights [out_features, in_features] as panels; of gate and up merged, `out_features` counts one of the two."""

    packed: _NativePacked
    weight_format: int
    out_features: int
    in_features: int
    interleaved: bool

    @property
    def num_columns(self) -> int:
        """Columns of a product in memory: out_features rounded up to whole panels."""
        return self.packed.columns // 2 if self.interleaved else self.packed.columns

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return self.packed.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Left-hand sides of products, in the format of their weights."""

    weight_format: int
    width: int
    #: int32 [num_rows, stride]; for int8 the high bytes of 16-bit integers, offset by 128.
    units: Tensor
    #: int8 only: int32 [num_rows, stride], the low bytes.
    low: Tensor
    #: int8 only: float32 [num_rows]; value = scale * (256 * (high - 128) + low).
    scale: Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int, weight_format: int) -> Rows:
        """Memory for rows that are still to be written; padding is zero."""
        units = torch.zeros(2, num_rows, -(-width // _PER_UNIT[weight_format]), dtype=torch.int32)
        scale = torch.zeros(num_rows)
        return cls(weight_format=weight_format, width=width, units=units[0], low=units[1], scale=scale)

    def native(self) -> tuple[int, int, int, int, int]:
        """The arguments that `src/ops.cpp` takes."""
        stride = self.units.stride(0) if self.units.numel() else 0
        return self.weight_format, self.units.data_ptr(), self.low.data_ptr(), self.scale.data_ptr(), stride


def format_of(dtype: torch.dtype, *, int8: bool = False) -> int:
    """The format of packed weights of `dtype`, and of rows multiplied with them."""
    return INT8 if int8 else FORMATS[dtype]


def pack(
    weight: Tensor, bias: Tensor | None = None, *, int8: bool = False, instruction_set: str | None = None
) -> PackedMatrix:
    """weight: [out_features, in_features]; bias: [out_features], of the same dtype.

    bfloat16 weights are compressed to codes of 12 bits if `instruction_set` reads them and they save memory. Without an
    instruction set they stay uncompressed, for all.
    """
    return _pack([(weight, bias)], int8=int8, instruction_set=instruction_set)


def pack_gate_up(gate: Tensor, up: Tensor, *, int8: bool = False, instruction_set: str | None = None) -> PackedMatrix:
    """For `CpuOps.multiply_silu`; both [out_features, in_features]; otherwise like `pack`."""
    assert gate.shape == up.shape
    return _pack([(gate, None), (up, None)], int8=int8, instruction_set=instruction_set)


def _pack(matrices: list[tuple[Tensor, Tensor | None]], *, int8: bool, instruction_set: str | None) -> PackedMatrix:
    out_features, in_features = matrices[0][0].shape
    dtype = matrices[0][0].dtype
    assert in_features > 0
    held = [(weight.contiguous(), None if bias is None else bias.contiguous()) for weight, bias in matrices]
    for weight, bias in held:
        assert weight.dtype == dtype
        assert bias is None or (bias.dtype == dtype and bias.shape == (out_features,))
    addresses = [
        (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out_features, in_features) for weight, bias in held
    ]
    weight_format, interleaved = format_of(dtype, int8=int8), len(matrices) == 2
    packed = _native().pack(addresses, TYPES[dtype], weight_format, interleaved, instruction_set or "")
    return PackedMatrix(
        packed=packed,
        weight_format=weight_format,
        out_features=out_features,
        in_features=in_features,
        interleaved=interleaved,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """The rows of a step over a KV cache (`kernels.ops.Ops.paged_kv`), and the softmax scale."""

    rows: KvRows
    kv_cache: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTarget:
    """Memory for heads of rows: head h of row r goes to element `offsets[r] + h * head_stride` of `out`."""

    out: Tensor
    #: int64 [num_rows]
    offsets: Tensor
    head_stride: int

    def check(self, x: Tensor) -> None:
        """Asserts that heads x [num_rows, heads, head_dim] fit."""
        num_rows, heads, head_dim = x.shape
        assert self.offsets.dtype == torch.int64
        assert self.offsets.is_contiguous()
        assert self.offsets.shape == (num_rows,)
        assert self.out.is_contiguous()
        if x.numel():
            assert int(self.offsets.min()) >= 0
            assert int(self.offsets.max()) + (heads - 1) * self.head_stride + head_dim <= self.out.numel()

    def native(self) -> tuple[int, int, int, int]:
        """The arguments that `src/ops.cpp` takes."""
        return TYPES[self.out.dtype], self.out.data_ptr(), self.offsets.data_ptr(), self.head_stride


class CpuOps:
    """The ops of one instruction set on a group of threads. `times` repeats an op within one call."""

    def __init__(self, instruction_set: str, num_threads: int = 1, cpus: Sequence[int] = ()) -> None:
        """`cpus`: cores to pin the threads to, except for the caller's; empty: not pinned."""
        self._machine = _native().Machine(instruction_set, num_threads, list(cpus))

    def multiply(self, rows: Rows, matrices: Sequence[PackedMatrix], out: Tensor) -> None:
        """rows @ matrix.T + bias for each matrix, one after the other, into the same `out`.

        out: float32 [num_rows, at least num_columns]. The columns up to `num_columns` are written.
        """
        self._multiply(rows, matrices, out, interleaved=False)

    def multiply_silu(self, rows: Rows, matrices: Sequence[PackedMatrix], out: Tensor) -> None:
        """silu(rows @ gate.T) * (rows @ up.T); otherwise like `multiply`."""
        self._multiply(rows, matrices, out, interleaved=True)

    def _multiply(self, rows: Rows, matrices: Sequence[PackedMatrix], out: Tensor, *, interleaved: bool) -> None:
        _check_floats(out)
        assert len(rows.units) == len(out)
        for matrix in matrices:
            assert matrix.weight_format == rows.weight_format
            assert matrix.in_features == rows.width
            assert matrix.interleaved == interleaved
            assert out.shape[1] >= matrix.num_columns
        packed = [matrix.packed for matrix in matrices]
        self._machine.multiply(rows.native(), len(out), packed, interleaved, out.data_ptr(), out.shape[1])

    def to_rows(self, x: Tensor, out: Rows, *, times: int = 1) -> None:
        """Rounds x, float32 [num_rows, width], to the format of `out`."""
        _check_floats(x)
        assert x.shape == (len(out.units), out.width)
        self._machine.to_rows(x.data_ptr(), *x.shape, out.native(), times)

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Rows, *, times: int = 1) -> None:
        """out = rms_norm(x) * weight. Float32: weight [width], x [num_rows, width]."""
        _check_floats(x, weight)
        assert x.shape == (len(out.units), out.width)
        assert weight.shape == (out.width,)
        assert out.width <= MAX_HIDDEN_SIZE
        self._machine.norm(x.data_ptr(), weight.data_ptr(), eps, *x.shape, out.native(), times)

    def rotate(
        self,
        x: Tensor,
        angles: Tensor | None,
        target: HeadTarget,
        *,
        norm: tuple[Tensor, float] | None = None,
        times: int = 1,
    ) -> None:
        """Norms and rotates heads, rounds them to the target's dtype and stores them.

        x: float32 [num_rows, heads, head_dim]; angles: float32 [num_rows, 2, head_dim], cosines and then sines, or
        None: no rotation; norm: weight (float32 [head_dim]) and eps.
        """
        _check_floats(x, *(() if angles is None else (angles,)), *(() if norm is None else norm[:1]))
        num_rows, _, head_dim = x.shape
        assert head_dim % 2 == 0
        assert head_dim <= MAX_HEAD_DIM
        assert angles is None or angles.shape == (num_rows, 2, head_dim)
        assert norm is None or norm[0].shape == (head_dim,)
        target.check(x)
        weight, eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
        angles_address = 0 if angles is None else angles.data_ptr()
        self._machine.rotate(x.data_ptr(), weight, eps, angles_address, *x.shape, *target.native(), times)

    def attend(
        self, layer: int, q: Tensor, context: AttentionContext, out: Tensor, *, window: int | None = None
    ) -> None:
        """Causal attention of the rows over their own context, K and V as stored.

        q: rotated, [num_kv_heads, num_tokens, group_size, head_dim]: the `group_size` vectors that share a KV head are
        adjacent; of the cache's dtype, or float32 for float16. out: float32 [num_tokens, num_heads * head_dim].
        """
        num_kv_heads, num_tokens, group_size, head_dim = q.shape
        rows, kv_cache = context.rows, context.kv_cache
        _check_floats(out)
        assert q.dtype == (torch.float32 if kv_cache.dtype == torch.float16 else kv_cache.dtype)
        assert q.is_contiguous()
        assert kv_cache.is_contiguous()
        assert kv_cache.shape[3] == num_kv_heads
        assert kv_cache.shape[5] == head_dim
        assert 0 <= layer < kv_cache.shape[1]
        assert out.shape == (num_tokens, num_kv_heads * group_size * head_dim)
        indices = (rows.query_starts, rows.context_lens, rows.block_tables)
        assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in indices)
        self._machine.attend(
            (num_kv_heads * group_size, num_kv_heads, head_dim, context.scale),
            (kv_cache.data_ptr(), TYPES[kv_cache.dtype], *kv_cache.stride()[:4], kv_cache.shape[4]),
            (num_tokens, len(rows.context_lens), *(t.data_ptr() for t in indices), rows.block_tables.stride(0)),
            layer,
            window or 0,
            q.data_ptr(),
            out.data_ptr(),
            1,
        )

    def read(self, memory: Tensor) -> int:
        """Reads memory once, in lines of 64 bytes; returns the sum of its uint64 numbers modulo 2^64."""
        assert memory.is_contiguous()
        return self._machine.read(memory.data_ptr(), memory.numel() * memory.element_size())


def _check_floats(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()


def _native() -> _NativeOps:
    module = native.load()
    assert module is not None, native.missing_reason()
    return cast(_NativeOps, module)
