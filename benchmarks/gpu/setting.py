"""Common inputs of all rows: the model's shape and weights, the kernels, the device, and the sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.gpu.measure import Call, Clock, captured
from benchmarks.gpu.rows import Measured
from kernels.bench.inputs import BLOCK_SIZE, blocks_of, kv_rows, rotations
from kernels.bench.shapes import LLAMA_8B, random_weights
from kernels.bench.work import Spans, Work, decoder_work
from kernels.choice import Backend, KernelOptions, OpenedDecoder, open_decoder
from kernels.decoder import DecoderKernel, DecoderShape, DecoderWeights
from kernels.ops import KvRows, PagedKv
from kernels.reference.paged_kv import ReferencePagedKv

TRITON, REFERENCE = "triton", "reference"
DTYPE = torch.bfloat16
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the rows."""

    shape: DecoderShape
    repeats: int
    #: Runs of calls that take seconds.
    long_repeats: int
    copy_bytes: int
    matmul_size: int
    batch: int
    short_context: int
    long_context: int
    step_context: int
    prefill_tokens: int
    #: Requests at once, tokens of their prompts, and of their outputs.
    peer_load: tuple[int, int, int]
    #: Numbers of requests at once, tokens of their prompts, and of their outputs.
    at_once: tuple[int, int, int]
    request_tokens: tuple[int, int]


FULL = Sizes(
    shape=LLAMA_8B,
    repeats=25,
    long_repeats=3,
    copy_bytes=4 << 30,
    matmul_size=8192,
    batch=64,
    short_context=4096,
    long_context=32_768,
    step_context=2048,
    prefill_tokens=8192,
    peer_load=(16, 512, 64),
    at_once=(16, 64, 256),
    request_tokens=(1024, 128),
)
#: Sizes for a check in an interpreter.
TINY = Sizes(
    shape=DecoderShape(
        hidden_size=64,
        intermediate_size=96,
        vocab_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        windows=(None, None),
    ),
    repeats=1,
    long_repeats=1,
    copy_bytes=1 << 16,
    matmul_size=32,
    batch=2,
    short_context=20,
    long_context=40,
    step_context=18,
    prefill_tokens=32,
    peer_load=(2, 17, 3),
    at_once=(1, 2, 3),
    request_tokens=(17, 3),
)


class Setting:
    """Inputs of one run. Weights and decoders are created when a row first needs them, and kept."""

    def __init__(self, backend: str, sizes: Sizes, device: torch.device) -> None:
        self.backend = backend
        self.sizes = sizes
        self.device = device
        self.clock = Clock(device, sizes.repeats)
        self._decoders: dict[bool, OpenedDecoder] = {}

    @property
    def shape(self) -> DecoderShape:
        """Shape of the model."""
        return self.sizes.shape

    @property
    def has_graphs(self) -> bool:
        """Whether calls can be captured. The reference kernels need the contexts' lengths on the host."""
        return self.device.type == "cuda" and self.backend != REFERENCE

    @cached_property
    def weights(self) -> DecoderWeights:
        """Random weights, the same in every run on one type of device."""
        torch.manual_seed(_SEED)
        return random_weights(self.shape, DTYPE, self.device)

    def decoder(self, *, deterministic: bool) -> DecoderKernel:
        """The kernel of the whole model. Raises `KernelsUnavailable`."""
        if deterministic not in self._decoders:
            options = KernelOptions(backend=Backend.REFERENCE)
            if self.backend != REFERENCE:
                options = KernelOptions(backend=Backend(self.backend), deterministic=deterministic)
            max_tokens = max(self.sizes.long_context, self.sizes.prefill_tokens)
            angles = rotations(self.shape, max_tokens, self.device)
            self._decoders[deterministic] = open_decoder(options, self.shape, self.weights, angles)
        return self._decoders[deterministic].kernel

    @property
    def has_tall_tiles(self) -> bool:
        """Whether deterministic kernels take tiles of 128 rows, since this GPU computes the same bits with them."""
        opened = self._decoders.get(True)
        return opened is not None and opened.choice.tall_tiles

    def paged_kv(self, rows: KvRows, kv_cache: Tensor) -> PagedKv:
        """View of the cache for one step, in fast mode."""
        angles = rotations(self.shape, self.sizes.long_context, self.device)
        if self.backend == REFERENCE:
            return ReferencePagedKv(rows, kv_cache, angles, self.shape.scale)
        from kernels.triton.ops import TritonOps

        paged: PagedKv = TritonOps(deterministic=False).paged_kv(rows, kv_cache, angles, self.shape.scale)
        return paged

    def kv_cache(self, num_blocks: int, num_layers: int) -> Tensor:
        """A cache filled with random numbers: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        size = (num_blocks, num_layers, 2, self.shape.num_kv_heads, BLOCK_SIZE, self.shape.head_dim)
        return torch.empty(math.prod(size), dtype=DTYPE, device=self.device).normal_().view(size)

    def step(self, spans: Spans, *, deterministic: bool = False) -> tuple[Call, Work]:
        """A forward pass that returns the logits of each sequence's last row, and its work."""
        kernel, rows = self.decoder(deterministic=deterministic), kv_rows(spans, self.device, is_scattered=True)
        token_ids = torch.arange(len(rows.positions), device=self.device) % self.shape.vocab_size
        cache = self.kv_cache(blocks_of(spans), len(self.shape.windows))
        work = decoder_work(self.shape, spans, DTYPE.itemsize, kernel.weight_bytes)
        return partial(kernel.forward, token_ids, rows, rows.query_starts[1:] - 1, cache), work

    def measure(self, call: Call, work: Work, *, in_graph: bool) -> Measured:
        """Times a call, with `in_graph` as a CUDA graph if possible."""
        in_graph = in_graph and self.has_graphs
        samples_ms = self.clock.samples_ms(captured(call) if in_graph else call)
        return Measured(samples_ms=samples_ms, work=work, how="CUDA graph" if in_graph else "launched one by one")
