"""Decode steps replayed from CUDA graphs: one launch each instead of hundreds, for which a GPU would wait.

A graph has fixed shapes and addresses, so decode batches are padded to one of a few shapes. The bits of a row do not
depend on padding. Source: NVIDIA, CUDA C++ Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.engine.device_batch import BatchShape, DeviceBatches, current
from pdserve.engine.runner import StepDecoder
from pdserve.model.batch import Batch

#: Maximum number of graphs: all shapes of up to 256 sequences of up to 2,048 blocks. Each graph takes a few MiB in
#: addition to the memory that all share.
MAX_GRAPHS = 144
#: Smallest padded width of block tables; larger ones are powers of two.
_MIN_BLOCKS = 16
#: Up to this many sequences, batches are padded to a power of two; beyond, to a multiple of it.
_STEP = 8
#: Beyond this many sequences, batches are padded to a multiple of `_LARGE_STEP`.
_LARGE, _LARGE_STEP = 64, 32

Compute = Callable[[], Tensor]


class Recorder(Protocol):
    """Turns a computation into one that can be repeated."""

    def record(self, compute: Compute) -> Compute:
        """A function that repeats `compute` on the same memory, and returns the same tensor."""


class CudaRecorder:
    """Captures CUDA graphs, which share their memory: only the result of the latest replay is valid."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch has no public type for it.
        self._stream: torch.cuda.Stream | None = None

    def record(self, compute: Compute) -> Compute:
        # Run it once before, because compilation and allocation at first use must not be captured. All captures use
        # one stream, because cuBLAS keeps memory for each.
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the worker use CUDA meanwhile, which must not become part of the graph.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = compute()
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """How decode steps are recorded, and the largest batch that is replayed."""

    recorder: Recorder
    #: Sequences of the largest batch.
    max_num_seqs: int
    #: Blocks of its longest sequence.
    max_blocks: int
    #: Columns of the logits.
    vocab_size: int
    max_graphs: int = MAX_GRAPHS


class DeviceDecoder:
    """A decoder on a device that takes batches from the host. Replays graphs of decode steps if it has a config."""

    def __init__(self, decoder: StepDecoder, device: torch.device, graphs: GraphConfig | None = None) -> None:
        """`graphs` None: every step is launched kernel by kernel."""
        self._decoder = decoder
        # Launches go to the calling thread's current device.
        self._on_device = current(device)
        self._batches = DeviceBatches(device)
        self._graphs = None if graphs is None else _DecodeGraphs(decoder, device, graphs)

    def forward(
        self,
        batch: Batch,
        kv_cache: Tensor,
        on_layer: LayerListener | None = None,
        *,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """As `StepDecoder.forward`, for a batch on the host; the logits are on the device.

        `token_ids`, int64 [num_tokens] on the device, replace those of the batch. Returns without waiting. The next
        call overwrites the logits on the device, so their readers must be in the stream before it. A replayed step does
        not call `on_layer`. Batches for hidden states are not replayed.
        """
        with self._on_device:
            shape = BatchShape.of(batch)
            if self._graphs is None or batch.hidden_only or not self._graphs.has_graph_for(shape):
                return self._decoder.forward(self._batches.upload(batch, token_ids=token_ids), kv_cache, on_layer)
            return self._graphs.replay(batch, shape, kv_cache, token_ids)

    def drop_graphs(self) -> None:
        """Release what the graphs captured, before which a process group cannot end. No step may be in flight."""
        if self._graphs is not None:
            self._graphs.clear()


class _DecodeGraphs:
    """Records a graph for each padded shape at its first use, and replays it from then on."""

    def __init__(self, decoder: StepDecoder, device: torch.device, config: GraphConfig) -> None:
        self._decoder = decoder
        self._config = config
        self._largest = largest = decode_shape(config.max_num_seqs, config.max_blocks)
        # Graphs contain the address of this memory: it must never grow.
        self._batches = DeviceBatches(device, largest.num_elements)
        self._replays: OrderedDict[tuple[BatchShape, int], Compute] = OrderedDict()
        # One buffer for the results of all graphs, which cannot share their own, because logits are large.
        self._logits = torch.empty(largest.num_logits, config.vocab_size, dtype=torch.float32, device=device)

    def has_graph_for(self, shape: BatchShape) -> bool:
        """Whether batches of this shape are replayed."""
        return shape.is_decode_only and shape.num_sequences <= self._config.max_num_seqs

    def replay(self, batch: Batch, shape: BatchShape, kv_cache: Tensor, token_ids: Tensor | None) -> Tensor:
        """The logits of the batch, whose shape has a graph."""
        padded = decode_shape(shape.num_sequences, shape.num_blocks)
        if not self._replays and padded != self._largest:
            # The largest one comes first: its memory is enough for all others, in whichever order they are recorded.
            self._record(self._batches.upload(batch, self._largest, token_ids), self._largest, kv_cache)
        uploaded = self._batches.upload(batch, padded, token_ids)
        key = (padded, kv_cache.data_ptr())
        replay = self._replays.get(key) or self._record(uploaded, padded, kv_cache)
        self._replays.move_to_end(key)
        return replay()[: shape.num_sequences]

    def clear(self) -> None:
        """Drop all graphs."""
        self._replays.clear()

    def _record(self, uploaded: Batch, shape: BatchShape, kv_cache: Tensor) -> Compute:
        replay = self._config.recorder.record(lambda: self._compute(uploaded, kv_cache))
        self._replays[shape, kv_cache.data_ptr()] = replay
        if len(self._replays) > self._config.max_graphs:
            self._replays.popitem(last=False)
        return replay

    def _compute(self, uploaded: Batch, kv_cache: Tensor) -> Tensor:
        return self._logits[: len(uploaded.logits_rows)].copy_(self._decoder.forward(uploaded, kv_cache))


def decode_shape(num_sequences: int, num_blocks: int) -> BatchShape:
    """The padded shape for `num_sequences` sequences with block tables of width `num_blocks`."""
    step = _LARGE_STEP if num_sequences > _LARGE else _STEP
    rows = -(-num_sequences // step) * step if num_sequences > _STEP else _power_of_two(num_sequences)
    return BatchShape(
        num_tokens=rows, num_sequences=rows, num_logits=rows, num_blocks=max(_MIN_BLOCKS, _power_of_two(num_blocks))
    )


def _power_of_two(minimum: int) -> int:
    return 1 << max(0, minimum - 1).bit_length()
