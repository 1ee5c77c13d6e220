"""Decode steps replayed from CUDA graphs: a launch each instead of hundreds, at which a GPU would wait for the host.

A graph has fixed shapes and addresses, so batches of decoding sequences are padded to one of a few shapes. The bits of
a row do not depend on the padding beside it. Source: NVIDIA, CUDA C++ Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.engine.device_batch import BatchShape, DeviceBatches, current
from pdserve.engine.runner import StepDecoder
from pdserve.model.batch import Batch

#: Graphs that are kept; each takes a few MiB beside the memory that they share. For up to 256 sequences of up to 2,048
#: blocks there are no more shapes.
MAX_GRAPHS = 144
#: Block tables are padded to a power of two, from here on.
_LEAST_BLOCKS = 16
#: Batches of more sequences are padded to a multiple of this, smaller ones to a power of two; and large ones to a
#: multiple of the other.
_STEP, _LARGE_STEP = 8, 32
_LARGE = 64

Compute = Callable[[], Tensor]


class Recorder(Protocol):
    """Makes something that can be repeated out of a computation."""

    def record(self, compute: Compute) -> Compute:
        """A function that does again what `compute` does, on the same memory, and returns the same tensor."""


class CudaRecorder:
    """Captures CUDA graphs, which share their working memory: only the result of the latest replay is valid."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch does not name the type
        self._stream: torch.cuda.Stream | None = None

    def record(self, compute: Compute) -> Compute:
        # What is compiled or allocated at first use must not be captured. One stream: cuBLAS keeps memory for each.
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the worker go on meanwhile: what they ask of CUDA is not part of it.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = compute()
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class DeviceDecoder:
    """A decoder that takes batches from the host. Without a recorder every step is launched kernel by kernel."""

    def __init__(
        self,
        decoder: StepDecoder,
        device: torch.device,
        *,
        recorder: Recorder | None,
        max_num_seqs: int,
        max_blocks: int,
        vocab_size: int,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        """`max_num_seqs` sequences of `max_blocks` blocks is the largest batch that is replayed."""
        self._decoder = decoder
        self._recorder = recorder
        self._max_num_seqs = max_num_seqs
        self._max_graphs = max_graphs
        # Launches go to the calling thread's current device.
        self._on_device = current(device)
        self._batches = DeviceBatches(device)
        # Its address is in the graphs.
        self._largest = largest = decode_shape(max_num_seqs, max_blocks)
        self._fixed = DeviceBatches(device, largest.num_elements if recorder else 0)
        self._graphs: OrderedDict[tuple[BatchShape, int], Compute] = OrderedDict()
        # Of all graphs: what a graph returns is not shared with the others, and logits are large.
        rows = largest.num_logits if recorder else 0
        self._logits = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)

    def forward(
        self,
        batch: Batch,
        kv_cache: Tensor,
        on_layer: LayerListener | None = None,
        *,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """As `Decoder.forward`, for a batch on the host; the logits are on the device.

        `token_ids`, int64 [num_tokens], are on the device and take the place of the batch's. Nothing is waited for. The
        next call writes to the same memory, on the device: what reads the logits has to be in the stream before it.
        What is replayed tells `on_layer` nothing.
        """
        with self._on_device:
            return self._forward(batch, kv_cache, on_layer, token_ids)

    def _forward(
        self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None, token_ids: Tensor | None
    ) -> Tensor:
        shape = BatchShape.of(batch)
        if self._recorder is None or not shape.is_decode_only or shape.num_sequences > self._max_num_seqs:
            return self._decoder.forward(self._batches.upload(batch, token_ids=token_ids), kv_cache, on_layer)
        padded = decode_shape(shape.num_sequences, shape.num_blocks)
        if not self._graphs and padded != self._largest:
            # First of all: the others find room in what it takes, and no order of theirs needs more.
            self._record(self._fixed.upload(batch, self._largest, token_ids), self._largest, kv_cache)
        there = self._fixed.upload(batch, padded, token_ids)
        key = (padded, kv_cache.data_ptr())
        replay = self._graphs.get(key) or self._record(there, padded, kv_cache)
        self._graphs.move_to_end(key)
        return replay()[: shape.num_sequences]

    def _record(self, there: Batch, shape: BatchShape, kv_cache: Tensor) -> Compute:
        assert self._recorder is not None
        replay = self._recorder.record(lambda: self._compute(there, kv_cache))
        self._graphs[shape, kv_cache.data_ptr()] = replay
        if len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)
        return replay

    def drop_graphs(self) -> None:
        """They hold on to what was captured: a process group cannot end before. No step is being computed."""
        self._graphs.clear()

    def _compute(self, there: Batch, kv_cache: Tensor) -> Tensor:
        return self._logits[: len(there.logits_rows)].copy_(self._decoder.forward(there, kv_cache))


def decode_shape(num_sequences: int, num_blocks: int) -> BatchShape:
    """The padded shape for so many sequences with block tables of that width."""
    step = _LARGE_STEP if num_sequences > _LARGE else _STEP
    rows = -(-num_sequences // step) * step if num_sequences > _STEP else _power_of_two(num_sequences)
    return BatchShape(
        num_tokens=rows, num_sequences=rows, num_logits=rows, num_blocks=max(_LEAST_BLOCKS, _power_of_two(num_blocks))
    )


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
