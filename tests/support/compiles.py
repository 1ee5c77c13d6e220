"""Compiles the Triton kernels of whole steps and of packing blocks for a Hopper GPU, without having one.

    python -m tests.support.compiles [--few]

Triton's interpreter accepts code that its compiler refuses, and ignores registers and shared memory. Here every launch
compiles its kernel for its arguments and computes nothing. Prints a line for each variant. The exit code is 1 when one
does not compile or needs more shared memory than there is, or when tall tiles or gated products have other matrix
instructions than small tiles. With --few, each kernel has at least one variant.
"""

from __future__ import annotations

import re
import sys
import warnings
from array import array
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.bench.inputs import BLOCK_SIZE, blocks_of, kv_rows, rotations
from kernels.bench.shapes import LLAMA_8B, random_weights
from kernels.bench.work import Spans
from kernels.decoder import DecoderShape, DecoderWeights
from kernels.triton import blocks, gemm
from kernels.triton.decoder import TritonDecoder
from kernels.triton.ops import TritonOps
from kernels.triton.paged_kv import TritonPagedKv
from kernels.triton.paged_step import PagedStep
from pdserve.base.sampling import SamplingParams
from pdserve.engine.device_sampler import DeviceSampler
from pdserve.engine.sequence import SampleRow

#: Shared memory of a program, at most, on an H100 or H200.
SHARED_BYTES = 227 << 10
#: One layer with the heads of Llama 3.1 8B, and one with a window and the widest heads.
_LLAMA = replace(LLAMA_8B, vocab_size=1024, intermediate_size=2048, windows=(None,))
_WIDE = replace(_LLAMA, hidden_size=512, num_heads=4, num_kv_heads=2, head_dim=256, windows=(64,))
_STEPS: tuple[Spans, ...] = ([(1, 2048)], [(1, 100)] * 64, [(64, 256), (1, 100)])
_PROMPT: Spans = [(64, 256)]
_PLAIN = SamplingParams(temperature=1.0)
_EDITED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, logit_bias={1: 1.0}, logprobs=5)


class _Hopper:
    """Stands in for Triton's driver: a device in name only."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Instruction(NamedTuple):
    """A matrix instruction, and how a tile of results is divided among warps."""

    warps_along_rows: int
    warps_along_columns: int
    #: Rows for each warp.
    num_rows: int
    num_columns: int
    depth: int


def _instructions(ttgir: str) -> set[Instruction]:
    found = re.findall(r"warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[(\d+), (\d+), (\d+)\]", ttgir)
    return {Instruction(*map(int, numbers)) for numbers in found}


class Compiler:
    """Compiles instead of launching; reports each variant and each failure once."""

    def __init__(self) -> None:
        self.num_failures = 0
        #: Matrix instructions of the last launch.
        self.instructions: set[Instruction] = set()
        self._seen: set[object] = set()
        self._launch = JITFunction.run

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Compiles, and computes nothing. After a failure the other kernels are still compiled."""
        name = kernel.__name__
        try:
            variant = self._launch(kernel, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # noqa: BLE001 - the compiler raises many kinds
            self._report(name, name, f"{type(error).__name__}: {error}", is_failure=True)
            return
        metadata = variant.metadata
        self.instructions = _instructions(variant.asm["ttgir"])
        shared, text = metadata.shared, f"{metadata.num_warps} warps, {metadata.shared} bytes of shared memory"
        self._report((name, variant.hash), name, text, is_failure=shared > SHARED_BYTES)

    def require_same_chain(self, what: str, flat: set[Instruction], tall: set[Instruction], *, columns: bool) -> None:
        """Tall tiles have more warps along the rows, and otherwise the same instructions. `columns`: as many, too."""

        def chain(instructions: set[Instruction]) -> set[tuple[int, ...]]:
            return {(*each[1:3], each.depth, each.num_columns if columns else 0) for each in instructions}

        is_same = bool(flat) and chain(flat) == chain(tall) and all(each.warps_along_columns == 1 for each in tall)
        self._report((what, *flat, *tall), what, f"{sorted(flat)} and {sorted(tall)}", is_failure=not is_same)

    def _report(self, key: object, name: str, text: str, *, is_failure: bool) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self.num_failures += is_failure
            print(f"{'FAILED' if is_failure else 'compiled'} {name}: {text}", flush=True)


@cache
def _weights(shape: DecoderShape, dtype: torch.dtype) -> DecoderWeights:
    return random_weights(shape, dtype)


def _forward(shape: DecoderShape, spans: Spans, *, deterministic: bool, is_qwen3_fp8: bool = False) -> None:
    """Compiles a forward pass. `is_qwen3_fp8`: with per-head norms and an fp8 KV cache."""
    dtype, rows = torch.bfloat16, kv_rows(spans)
    angles, weights = rotations(shape, max(context for _, context in spans)), _weights(shape, dtype)
    scales, kv_dtype = None, dtype
    if is_qwen3_fp8:
        norm = torch.ones(shape.head_dim, dtype=dtype)
        weights = replace(weights, layers=tuple(replace(layer, q_norm=norm, k_norm=norm) for layer in weights.layers))
        scales, kv_dtype = torch.ones(len(shape.windows), 2, shape.num_kv_heads), torch.float8_e4m3fn
    ops = TritonOps(deterministic=deterministic, gated_products=deterministic)
    decoder = TritonDecoder(ops, shape, weights, angles, kv_scales=scales)
    size = (blocks_of(spans), len(shape.windows), 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    cache = torch.zeros(size, dtype=torch.uint8 if is_qwen3_fp8 else dtype).view(kv_dtype)
    decoder.forward(torch.zeros_like(rows.positions), rows, rows.query_starts[1:] - 1, cache)


def _check_tall_tiles(compiler: Compiler) -> None:
    """Products and prefill attention: two groups of warps do what one does."""
    x = torch.zeros(130, 64, dtype=torch.bfloat16)
    for out_features in (1000, 4096, 20000):
        weight = torch.zeros(out_features, 64, dtype=torch.bfloat16)
        gemm.linear(x, weight)
        flat = compiler.instructions
        for tile in gemm.TALL_TILES:
            gemm.linear(x, weight, tile=tile)
            compiler.require_same_chain("tall product", flat, compiler.instructions, columns=False)
        for tile in (None, *gemm.TALL_TILES):
            gemm.gated_linear(x, weight, tile=tile)
            compiler.require_same_chain("gated product", flat, compiler.instructions, columns=False)
    for head_dim in (64, 128):
        rows = kv_rows(_PROMPT)
        kv_cache = torch.zeros(blocks_of(_PROMPT), 1, 2, 8, BLOCK_SIZE, head_dim, dtype=torch.bfloat16)
        step = PagedStep(rows=rows, kv_cache=kv_cache, cos_sin=torch.zeros(512, 2, head_dim), scale=0.1)
        instructions = []
        for tall_tiles in (False, True):
            paged = TritonPagedKv(step, deterministic=True, tall_tiles=tall_tiles)
            paged.attention(0, torch.zeros(64, 32, head_dim, dtype=torch.bfloat16), None)
            instructions.append(compiler.instructions)
        compiler.require_same_chain("tall attention", *instructions, columns=True)


def _move_blocks(num_layers: int, heads: tuple[int, int], *, blocks_of_moves: tuple[tuple[int, ...], ...]) -> None:
    cache = torch.zeros(4, num_layers, 2, 8, BLOCK_SIZE, 128, dtype=torch.bfloat16)
    packed = cache[:2, :, :, heads[0] : heads[1]].reshape(2, -1).view(torch.uint8)
    keys = blocks.digest_keys(bytes(16), cache[0].nbytes, cache.device)
    for ids in map(torch.tensor, blocks_of_moves):
        for move in (
            blocks.pack,
            lambda cache, ids, packed, keys, **ranges: blocks.unpack(packed, cache, ids, keys, **ranges),
        ):
            move(cache, ids, packed[: len(ids)], keys, layers=(0, num_layers), heads=heads)
        here, there = (
            blocks.Blocks(cache, ids),
            blocks.Slices(torch.zeros_like(cache).view(-1).view(torch.uint8), ids * 2),
        )
        layers = (0, num_layers)
        sums = torch.empty(blocks.num_sums(cache, len(ids), layers), dtype=torch.int64)
        blocks.gather(there, here, keys, sums, layers=layers)
        blocks.scatter(here, there, keys, sums, layers=layers)
        blocks.digest(here, keys, sums, layers=layers)


def _sample(*kinds: SamplingParams) -> None:
    """The results are meaningless."""
    for params in kinds:
        rows = [SampleRow(params=params, choice_index=0, tokens=array("q", [1, 2]), num_prompt=1) for _ in range(4)]
        DeviceSampler(torch.device("cpu")).sample(torch.zeros(4, LLAMA_8B.vocab_size), rows, range(4))


def _compile_few() -> None:
    _move_blocks(2, (2, 4), blocks_of_moves=((0, 1),))
    _forward(_LLAMA, _STEPS[0], deterministic=False)
    _forward(_LLAMA, _PROMPT, deterministic=True, is_qwen3_fp8=True)
    _sample(_EDITED)


def _compile_all() -> None:
    for heads in ((0, 8), (2, 4)):
        _move_blocks(2, heads, blocks_of_moves=((0, 1), (3,)))
    for deterministic in (True, False):
        for spans in _STEPS:
            _forward(_LLAMA, spans, deterministic=deterministic)
    _forward(_WIDE, _STEPS[-1], deterministic=True)
    _forward(_LLAMA, _STEPS[-1], deterministic=True, is_qwen3_fp8=True)
    _sample(_PLAIN, _EDITED)


def main() -> int:
    """Returns the exit code."""
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    triton.runtime.driver.set_active(_Hopper())
    compiler = Compiler()
    # As in tests on a GPU.
    warnings.simplefilter("error")
    JITFunction.run = lambda kernel, *args, **options: compiler.run(kernel, *args, **options)
    with torch.no_grad():
        _compile_few() if "--few" in sys.argv[1:] else _compile_all()
        _check_tall_tiles(compiler)
    return int(compiler.num_failures > 0)


if __name__ == "__main__":
    sys.exit(main())
