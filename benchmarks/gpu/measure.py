"""How long a call takes on the device, what the device can do at best, and which device it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.gpu.rows import Ceilings

Call = Callable[[], object]
Result = TypeVar("Result")

#: Several times what the L2 cache of any GPU holds: written between two repetitions.
_FLUSH_BYTES = 256 << 20
#: Cycles for which the GPU waits before a timed call, so that the host has launched it by then: about 0.6 ms.
_HEAD_START_CYCLES = 1_000_000
_WARM_UP = 3
_GRAPH_WARM_UP = 3


class Clock:
    """Times calls: on a GPU between events in its stream, with a cold L2 cache; else as they pass."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.repeats = repeats
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES if self._is_gpu else 0, dtype=torch.uint8, device=device)

    def samples_ms(self, call: Call) -> tuple[float, ...]:
        """Milliseconds of each repetition, after some that compile and warm up."""
        for _ in range(_WARM_UP if self._is_gpu else 0):
            call()
        once = self._once_on_gpu if self._is_gpu else self.once_ms
        return tuple(once(call) for _ in range(self.repeats))

    def once_ms(self, call: Call) -> float:
        """By the host's clock, until the device is done."""
        return self.timed(call)[0]

    def timed(self, call: Callable[[], Result]) -> tuple[float, Result]:
        """The same, with what the call returned."""
        self.synchronize()
        begin = time.perf_counter()
        result = call()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e3, result

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def _once_on_gpu(self, call: Call) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(begin.elapsed_time(end))


def captured(call: Call) -> Call:
    """The call as a CUDA graph, as a serving step replays it: without what the host does for each kernel."""
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
        # The graph writes to it: it must live as long.
        return result

    return replay


def measure_ceilings(clock: Clock, device: torch.device, *, copy_bytes: int, matmul_size: int) -> Ceilings:
    """A copy within the device's memory, and a product of two square bfloat16 matrices."""
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
    """The GPU and what drives it; nothing that names the machine."""
    if device.type != "cuda":
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 1024**3),
        "gpu_processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }
