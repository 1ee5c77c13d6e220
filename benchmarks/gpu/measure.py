"""Times calls on the device, measures the device's ceilings, and describes it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.gpu.rows import Ceilings

Call = Callable[[], object]
Result = TypeVar("Result")

#: Several times the L2 cache of any GPU; written between repetitions.
_FLUSH_BYTES = 256 << 20
#: Cycles for which the GPU waits before a timed call, while the host launches it: about 0.6 ms.
_HEAD_START_CYCLES = 1_000_000
_WARM_UP = 3
_GRAPH_WARM_UP = 3


class Clock:
    """Times calls: on a GPU with events in its stream and a cold L2 cache, else by the host's clock."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.repeats = repeats
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES if self._is_gpu else 0, dtype=torch.uint8, device=device)

    def samples_ms(self, call: Call) -> tuple[float, ...]:
        """Milliseconds of each repetition, after calls that compile and warm up."""
        for _ in range(_WARM_UP if self._is_gpu else 0):
            call()
        once = self._once_on_gpu if self._is_gpu else self.once_ms
        return tuple(once(call) for _ in range(self.repeats))

    def once_ms(self, call: Call) -> float:
        """Milliseconds by the host's clock until the device is done."""
        return self.timed(call)[0]

    def timed(self, call: Callable[[], Result]) -> tuple[float, Result]:
        """The same, with the result of the call."""
        self.synchronize()
        started_at = time.perf_counter()
        result = call()
        self.synchronize()
        return (time.perf_counter() - started_at) * 1e3, result

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def _once_on_gpu(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end))


def captured(call: Call) -> Call:
    """Captures the call as a CUDA graph, which a serving step replays without host work per kernel."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_GRAPH_WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> object:
        graph.replay()
        # The graph writes to the result, which must live as long as the graph.
        return result

    return replay


def measure_ceilings(clock: Clock, device: torch.device, *, copy_bytes: int, matmul_size: int) -> Ceilings:
    """Measures a copy within device memory, and a product of two square bfloat16 matrices."""
    copy_ms = statistics.median(clock.samples_ms(_copy(copy_bytes, device)))
    matmul_ms = statistics.median(clock.samples_ms(_product(matmul_size, device)))
    return Ceilings(
        copy_gb_per_s=2 * copy_bytes / copy_ms / 1e6,
        matmul_tflop_per_s=2 * matmul_size**3 / matmul_ms / 1e9,
    )


def _copy(num_bytes: int, device: torch.device) -> Call:
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _product(size: int, device: torch.device) -> Call:
    a, b, out = (torch.randn(size, size, device=device).bfloat16() for _ in range(3))
    return lambda: torch.matmul(a, b.T, out=out)


def describe_device(device: torch.device) -> dict[str, object]:
    """The GPU and its driver; nothing that identifies the machine."""
    if device.type != "cuda":
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 1024**3),
        "gpu_processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }
