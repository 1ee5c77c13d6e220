"""Decode steps replayed from CUDA graphs: one launch each instead of hundreds, for which a GPU would wait.

A graph has fixed shapes and addresses, so decode batches are padded to one of a few shapes. The bits of a row do not
depend on padding. No step is recorded while a request waits for it: one whose shape is not recorded yet takes a larger
graph. Source: NVIDIA, CUDA C++ Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.engine.device_batch import BatchShape, DeviceBatches, current, empty_batch
from pdserve.engine.graph_shapes import GraphShapes, decode_shape
from pdserve.engine.runner import StepDecoder
from pdserve.model.batch import Batch

Compute = Callable[[], Tensor]

#: Rows of one tile of a product.
_ROWS_OF_TILE = 64


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
        """As `Recorder.record`. Raises `torch.OutOfMemoryError`, also for memory that the driver lacks."""
        try:
            return self._record(compute)
        except torch.AcceleratorError as error:
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise

    def _record(self, compute: Compute) -> Compute:
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
        # The first replay is slower: the driver sends the graph to the device. Padding rows write no KV.
        graph.replay()
        torch.cuda.current_stream().synchronize()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Which decode steps are recorded, and how."""

    recorder: Recorder
    shapes: GraphShapes
    #: Columns of the logits.
    vocab_size: int


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
            graph = None if self._graphs is None else self._graphs.find(batch, kv_cache)
            if self._graphs is None or graph is None:
                return self._decoder.forward(self._batches.upload(batch, token_ids=token_ids), kv_cache, on_layer)
            return self._graphs.replay(graph, batch, token_ids)

    def record_next(self, kv_cache: Tensor, *, is_idle: bool) -> bool:
        """Record one more graph, for steps on this cache; whether any was left. No step may be in flight.

        `is_idle`: also one that is not needed at the start. Raises `torch.OutOfMemoryError`.
        """
        with self._on_device:
            return self._graphs is not None and self._graphs.record_next(kv_cache, is_idle=is_idle)

    def drop_graphs(self) -> None:
        """Release what the graphs captured, before which a process group cannot end. No step may be in flight."""
        if self._graphs is not None:
            self._graphs.clear()


class _DecodeGraphs:
    """Graphs of decode steps on one KV cache, by their padded shapes."""

    def __init__(self, decoder: StepDecoder, device: torch.device, config: GraphConfig) -> None:
        self._decoder = decoder
        self._config = config
        largest = config.shapes.largest
        # Graphs contain the addresses of these: they must never grow.
        self._batches = DeviceBatches(device, largest.num_elements)
        self._tables = torch.zeros(largest.num_sequences * largest.num_blocks, dtype=torch.int64, device=device)
        # One buffer for the results of all graphs, which cannot share their own, because logits are large.
        self._logits = torch.empty(largest.num_logits, config.vocab_size, dtype=torch.float32, device=device)
        self._replays: dict[BatchShape, Compute] = {}
        #: The graph that takes each padded shape.
        self._taking: dict[BatchShape, BatchShape] = {}
        #: Address of the cache that the graphs contain.
        self._cache_at = 0

    def find(self, batch: Batch, kv_cache: Tensor) -> BatchShape | None:
        """Shape of the cheapest graph that can take the batch; None: none can."""
        shape = BatchShape.of(batch)
        if batch.hidden_only or not shape.is_decode_only or kv_cache.data_ptr() != self._cache_at:
            return None
        padded = decode_shape(shape.num_sequences, shape.num_blocks)
        taking = self._taking.get(padded)
        if taking is None:
            taking = min((each for each in self._replays if each.has_space_for(padded)), key=_cost, default=None)
            if taking is not None:
                self._taking[padded] = taking
        return taking

    def replay(self, graph: BatchShape, batch: Batch, token_ids: Tensor | None) -> Tensor:
        """The logits of the batch, computed by the graph of that shape."""
        num_sequences, num_blocks = batch.block_tables.shape
        # The padding of a table is never read, and may be large: it stays here.
        uploaded = self._batches.upload(batch, replace(graph, num_blocks=num_blocks), token_ids)
        self._tables_of(graph)[:num_sequences, :num_blocks] = uploaded.block_tables[:num_sequences]
        return self._replays[graph]()[:num_sequences]

    def record_next(self, kv_cache: Tensor, *, is_idle: bool) -> bool:
        """As `DeviceDecoder.record_next`."""
        shapes = self._config.shapes
        due = (*shapes.at_start, *shapes.when_idle) if is_idle else shapes.at_start
        shape = next((each for each in due if each not in self._replays), None)
        if shape is None:
            return False
        assert kv_cache.data_ptr() == self._cache_at or not self._replays
        self._cache_at = kv_cache.data_ptr()
        padding = self._batches.upload(empty_batch(), shape)
        batch = replace(padding, block_tables=self._tables_of(shape))
        self._replays[shape] = self._config.recorder.record(lambda: self._compute(batch, kv_cache))
        self._taking.clear()
        return True

    def clear(self) -> None:
        """Drop all graphs."""
        self._replays.clear()
        self._taking.clear()

    def _tables_of(self, shape: BatchShape) -> Tensor:
        """The block tables in a graph: int64 [num_sequences, num_blocks]."""
        return self._tables[: shape.num_sequences * shape.num_blocks].view(shape.num_sequences, shape.num_blocks)

    def _compute(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        return self._logits[: len(batch.logits_rows)].copy_(self._decoder.forward(batch, kv_cache))


def _cost(shape: BatchShape) -> tuple[int, int, int]:
    """Orders graphs by their time for the same step: row tiles of products, then programs of attention."""
    num_rows = shape.num_sequences
    return -(-num_rows // _ROWS_OF_TILE), num_rows * shape.num_blocks, shape.num_blocks
