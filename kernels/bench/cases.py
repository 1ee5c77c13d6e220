"""The benchmark's cases: each op of a shape, in C++ and as the reference, with the amount of work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.bench.inputs import BLOCK_SIZE, blocks_of, kv_rows, rotations
from kernels.bench.shapes import random_weights
from kernels.bench.work import Work, attention_work, decoder_work
from kernels.choice import Backend, KernelOptions, open_decoder
from kernels.cpu.ops import AttentionContext, CpuOps, HeadTarget, PackedMatrix, Rows, format_of, pack, pack_gate_up
from kernels.decoder import DecoderShape
from kernels.ops import PagedKv
from kernels.reference import ReferenceOps

_ROWS = (1, 4, 16, 64, 512)
_DTYPES = {"bf16": torch.bfloat16, "int8": torch.bfloat16, "f32": torch.float32}
#: Bytes of weights and KV that a call reads, so that no cache holds them; and the largest matrix, in elements.
_WALKED_BYTES = 96 << 20
_MAX_WEIGHTS = 32 << 20
#: Products of this many rows or more are measured with few matrices: they are bound by compute, not by memory.
_MANY_ROWS = 64
#: Repetitions of ops on rows, which are shorter than a call from Python.
_TIMES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table. Both calls do the op `count` times."""

    op: str
    size: str
    weight_format: str
    call: Callable[[], object]
    #: None: the reference has no such op.
    reference: Callable[[], object] | None
    count: int
    reference_count: int
    #: Work of one op.
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The model shape, instruction set and threads of a run."""

    shape: DecoderShape
    instruction_set: str
    threads: int


def linear(setting: Setting) -> Iterator[Case]:
    """Products of 1 to 512 rows with the matrices of a layer; gate and up include SwiGLU."""
    shape = setting.shape
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = {
        "qkv": (width + 2 * kv_width, shape.hidden_size),
        "gate_up_silu": (shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "lm_head": (shape.vocab_size, shape.hidden_size),
    }
    for op, (features, depth) in matrices.items():
        for weight_format in _DTYPES:
            yield from _products(setting, op, min(features, _MAX_WEIGHTS // depth // 32 * 32), depth, weight_format)


def _products(setting: Setting, op: str, features: int, depth: int, weight_format: str) -> Iterator[Case]:
    ops, reference = CpuOps(setting.instruction_set, setting.threads), ReferenceOps()
    dtype, int8, gated = _DTYPES[weight_format], weight_format == "int8", op == "gate_up_silu"
    weights = [torch.randn(features, depth).to(dtype) for _ in range(2 if gated else 1)]
    packed = _pack(weights, setting.instruction_set, int8=int8)
    copies = math.ceil(_WALKED_BYTES / packed.num_bytes)
    packs = [packed, *(_pack(weights, setting.instruction_set, int8=int8) for _ in range(copies - 1))]
    clones = [weights, *([weight.clone() for weight in weights] for _ in range(copies - 1))]
    for num_rows in _ROWS:
        x = torch.randn(num_rows, depth)
        rows = Rows.empty(num_rows, depth, format_of(dtype, int8=int8))
        ops.to_rows(x, rows)
        out, narrow = torch.zeros(num_rows, packed.num_columns), x.to(dtype)
        some = packs if num_rows < _MANY_ROWS else packs[:2]

        def call(rows: Rows = rows, out: Tensor = out, some: list[PackedMatrix] = some) -> None:
            (ops.multiply_silu if gated else ops.multiply)(rows, some, out)

        def refer(x: Tensor = narrow, count: int = len(some)) -> None:
            for matrices in clones[:count]:
                results = [reference.linear(x, weight) for weight in matrices]
                if gated:
                    reference.silu_mul(*results)

        work = Work(num_bytes=packed.num_bytes, flops=2.0 * num_rows * depth * features * len(weights))
        yield Case(
            op=op,
            size=f"{num_rows} x {features}x{depth}",
            weight_format=weight_format,
            call=call,
            reference=refer,
            count=len(some),
            reference_count=len(some),
            work=work,
        )


def _pack(weights: list[Tensor], instruction_set: str, *, int8: bool) -> PackedMatrix:
    """Packs weights as a decoder does; two matrices are gate and up."""
    if len(weights) == 2:
        return pack_gate_up(*weights, int8=int8, instruction_set=instruction_set)
    return pack(weights[0], int8=int8, instruction_set=instruction_set)


def rows(setting: Setting) -> Iterator[Case]:
    """Ops on single rows: norms, and rotation with the write to the cache."""
    shape, reference = setting.shape, ReferenceOps()
    ops = CpuOps(setting.instruction_set, setting.threads)
    for num_rows in (1, 16, 512):
        x = torch.randn(num_rows, shape.hidden_size)
        weight = torch.ones(shape.hidden_size)
        area = Rows.empty(num_rows, shape.hidden_size, format_of(torch.bfloat16))
        yield Case(
            op="norm",
            size=f"{num_rows} x {shape.hidden_size}",
            weight_format="bf16",
            call=partial(ops.norm, x, weight, shape.rms_norm_eps, area, times=_TIMES),
            reference=partial(reference.rms_norm, x.bfloat16(), weight.bfloat16(), shape.rms_norm_eps),
            count=_TIMES,
            reference_count=1,
            work=Work(num_bytes=num_rows * shape.hidden_size * 6.0, flops=num_rows * shape.hidden_size * 4.0),
        )
        yield _rope(setting, ops, num_rows)


def _rope(setting: Setting, ops: CpuOps, num_rows: int) -> Case:
    shape = setting.shape
    dim, groups = shape.head_dim, shape.num_kv_heads
    step_rows, cache = kv_rows([(num_rows, num_rows)]), _kv_cache(shape, 1, math.ceil(num_rows / BLOCK_SIZE) + 1)
    cos_sin = rotations(shape, num_rows)
    q, k, v = (torch.randn(num_rows, heads, dim) for heads in (shape.num_heads, groups, groups))
    rotated, starts = torch.zeros(num_rows, shape.num_heads, dim).bfloat16(), torch.arange(num_rows) * (q[0].numel())
    block, _, kv, head, _, _ = cache.stride()
    slots = step_rows.slot_mapping // BLOCK_SIZE * block + step_rows.slot_mapping % BLOCK_SIZE * dim
    paged = ReferenceOps().paged_kv(step_rows, cache, cos_sin, shape.scale)
    narrow = q.bfloat16(), k.bfloat16(), v.bfloat16()

    def call() -> None:
        ops.rotate(q, cos_sin, HeadTarget(out=rotated, offsets=starts, head_stride=dim), times=_TIMES)
        ops.rotate(k, cos_sin, HeadTarget(out=cache, offsets=slots, head_stride=head), times=_TIMES)
        ops.rotate(v, None, HeadTarget(out=cache, offsets=slots + kv, head_stride=head), times=_TIMES)

    width = q[0].numel() + 2 * k[0].numel()
    return Case(
        op="rope_write_kv",
        size=f"{num_rows} x {width}",
        weight_format="bf16",
        call=call,
        reference=lambda: paged.rope_write_kv(0, *narrow),
        count=_TIMES,
        reference_count=1,
        work=Work(num_bytes=num_rows * width * 6.0, flops=num_rows * width * 3.0),
    )


def attention(setting: Setting) -> Iterator[Case]:
    """Single rows over contexts of 300 and 4,000 tokens, and prompts of 512 and 1,024."""
    shape = setting.shape
    ops = CpuOps(setting.instruction_set, setting.threads)
    decodes = [(f"decode {n} x {context}", [(1, context)] * n) for n in (1, 16) for context in (300, 4000)]
    prefills = [(f"prefill {n}", [(n, n)]) for n in (512, 1024)]
    for size, spans in decodes + prefills:
        step_rows = kv_rows(spans)
        num_tokens, work = len(step_rows.positions), attention_work(shape, spans, torch.bfloat16.itemsize)
        layers = 1 if spans[0][0] > 1 else min(32, math.ceil(_WALKED_BYTES / work.num_bytes))
        cache = _kv_cache(shape, layers, blocks_of(spans))
        q = torch.randn(
            shape.num_kv_heads, num_tokens, shape.num_heads // shape.num_kv_heads, shape.head_dim
        ).bfloat16()
        heads = q.permute(1, 0, 2, 3).reshape(num_tokens, shape.num_heads, shape.head_dim).contiguous()
        out = torch.zeros(num_tokens, shape.num_heads * shape.head_dim)
        paged = ReferenceOps().paged_kv(step_rows, cache, rotations(shape, 4096), shape.scale)

        context = AttentionContext(rows=step_rows, kv_cache=cache, scale=shape.scale)

        def call(a: tuple[Tensor, AttentionContext, Tensor] = (q, context, out), layers: int = layers) -> None:
            for layer in range(layers):
                ops.attend(layer, *a)

        def refer(paged: PagedKv = paged, heads: Tensor = heads, layers: int = layers) -> None:
            for layer in range(layers):
                paged.attention(layer, heads, None)

        yield Case(
            op="attention",
            size=size,
            weight_format="bf16",
            call=call,
            reference=refer,
            count=layers,
            reference_count=layers,
            work=work,
        )


def decoder(setting: Setting) -> Iterator[Case]:
    """Whole forward passes, with logits of each sequence's last row."""
    shape = setting.shape
    weights = random_weights(shape, torch.bfloat16)
    cos_sin = rotations(shape, 2048)
    reference = open_decoder(KernelOptions(backend=Backend.REFERENCE), shape, weights, cos_sin).kernel
    for weight_format, quantization in (("bf16", None), ("int8", "int8")):
        options = KernelOptions(
            backend=Backend.CPU,
            instruction_set=setting.instruction_set,
            num_threads=setting.threads,
            quantization=quantization,
        )
        kernel = open_decoder(options, shape, weights, cos_sin).kernel
        decodes = [(f"decode {n} x {context}", [(1, context)] * n) for n in (1, 16) for context in (300,)]
        for size, spans in [*decodes, *((f"prefill {n}", [(n, n)]) for n in (512, 1024))]:
            step_rows = kv_rows(spans)
            cache = _kv_cache(shape, len(shape.windows), blocks_of(spans))
            token_ids = torch.arange(len(step_rows.positions)) % shape.vocab_size
            step = (token_ids, step_rows, step_rows.query_starts[1:] - 1, cache)
            yield Case(
                op="decoder",
                size=size,
                weight_format=weight_format,
                call=partial(kernel.forward, *step),
                reference=partial(reference.forward, *step),
                count=1,
                reference_count=1,
                work=decoder_work(shape, spans, torch.bfloat16.itemsize, kernel.weight_bytes),
            )


#: Groups of cases by the names of `--ops`.
GROUPS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    "linear": linear,
    "rows": rows,
    "attention": attention,
    "decoder": decoder,
}


def _kv_cache(shape: DecoderShape, layers: int, num_blocks: int) -> Tensor:
    """Random bfloat16 in memory from numpy, which requests huge pages as the workers' cache does."""
    size = (num_blocks, layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    cache = torch.from_numpy(np.zeros(math.prod(size), np.int16)).view(torch.bfloat16).view(size)
    for block in cache:
        block.normal_()
    return cache
