"""A simulated GPU that runs the code of `--device cuda` on a CPU: devices, streams, events and graphs.

It finds tensors on the wrong device, reads before the data has arrived, memory that is overwritten or freed while it is
still read, and waits where none are allowed. Triton's kernels run in Triton's interpreter. It shows neither speed nor
the bits of a GPU's arithmetic, and simulates neither NCCL nor UCX.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kernels.triton import sample_rows
from pdserve.base import gpu_memory
from pdserve.base.config import set_default_variable
from tests.support.simulated_gpu import streams, tensors
from tests.support.simulated_gpu.memory import Driver
from tests.support.simulated_gpu.streams import gpu
from tests.support.simulated_gpu.tensors import GARBAGE, DeviceTensor, Memory, allocate, is_pinned, pin

#: Values of c10::DeviceType.
_CUDA, _META = 1, 14
_library: list[torch.library.Library] = []


def install(eagerness: float = 0.3, seed: float = 0) -> None:
    """Installs it for the rest of the process. Torch must be a build without CUDA, and Triton not yet imported.

    `eagerness`, `seed`: as `streams.Gpu`.
    """
    assert torch.version.cuda is None, "torch was built with CUDA, which the simulation cannot replace"
    _let_children_find_it()
    # Some ops import it to compute shapes. It must see torch as it is now.
    importlib.import_module("torch._dynamo")

    streams.start(eagerness=eagerness, seed=seed)
    _let_torch_guard()
    _let_torch_allocate()
    _let_torch_report()
    _let_torch_pin()
    _let_triton_launch()
    _let_processes_share()
    _let_ucx_reach()
    # A worker samples that many rows when it starts, to measure their memory. Read when the kernels are imported.
    sample_rows.MAX_ROWS = 4


def _let_children_find_it() -> None:
    here = Path(__file__).parent
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [str(here / "site"), str(here.parents[2]), *others]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _let_torch_guard() -> None:
    """Python's indexing queries the current device. The guard of meta tensors, which does nothing, answers it."""
    c10 = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
    guards = (ctypes.c_void_p * 21).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_META]
    torch.cuda._lazy_init = lambda: None

    # Without an index, it would use that guard's device as the current one.
    plain_to = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(tensors.DEVICE if _is_cuda(arg) else arg for arg in args)
        kwargs = {name: tensors.DEVICE if _is_cuda(arg) else arg for name, arg in kwargs.items()}
        return plain_to(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, device=None: self.to(tensors.DEVICE)  # type: ignore[assignment]


def _is_cuda(arg: Any) -> bool:
    return (isinstance(arg, str) and arg == "cuda") or (isinstance(arg, torch.device) and arg == torch.device("cuda"))


def _let_torch_allocate() -> None:
    def contiguous(size: Any) -> list[int]:
        return list(torch.empty(size, device="meta").stride())

    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "empty.memory_format",
        lambda size, *, dtype=None, **_: allocate(size, contiguous(size), dtype or torch.get_default_dtype()),
        "CUDA",
    )
    library.impl(
        "empty_strided",
        lambda size, stride, *, dtype=None, **_: allocate(size, stride, dtype or torch.get_default_dtype()),
        "CUDA",
    )
    _library.append(library)
    # These write to memory without calling ops, or compute its size only then.
    for name in ("tensor", "arange", "as_tensor", "randn", "rand", "randint"):
        setattr(torch, name, _on_device(getattr(torch, name)))


def _on_device(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


def _let_torch_report() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = streams.Stream, streams.Event, streams.InStream
    cuda.CUDAGraph, cuda.graph = streams.Graph, streams.Capture
    cuda.synchronize = streams.synchronize
    cuda.current_stream = lambda device=None: gpu().stream
    cuda.default_stream = lambda device=None: gpu().default
    cuda.device = lambda device: nullcontext()
    cuda._sleep = streams.sleep
    cuda.set_device = cuda.init = lambda *_: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: "simulated"
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="simulated",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=Memory.total_bytes,
        # PDSERVE_TEST_GPU_OF_ITS_OWN: as if each process had another GPU.
        uuid=f"GPU-{os.getpid()}" if "PDSERVE_TEST_GPU_OF_ITS_OWN" in os.environ else "GPU-simulated",
    )
    cuda.mem_get_info = lambda device=None: (Memory.total_bytes - Memory.allocated, Memory.total_bytes)
    cuda.memory_allocated = lambda device=None: Memory.allocated
    cuda.max_memory_allocated = lambda device=None: Memory.peak
    cuda.empty_cache = lambda: None
    cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)

    def set_sync_debug_mode(mode: str) -> None:
        gpu().refuses_hidden_waits = mode == "error"

    cuda.set_sync_debug_mode = set_sync_debug_mode

    def reset_peak(device: object = None) -> None:
        Memory.peak = Memory.allocated

    cuda.reset_peak_memory_stats = reset_peak


def _let_torch_pin() -> None:
    def pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if not pin_memory:
                return tensor
            if make is plain_empty:
                tensor.view(torch.uint8).fill_(GARBAGE)
            return pin(tensor)

        return made

    plain_empty = torch.empty
    torch.empty, torch.zeros = pinning(torch.empty), pinning(torch.zeros)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, device=None: pin(self.clone())
    torch.Tensor.is_pinned = lambda self, device=None: is_pinned(self)


def _let_triton_launch() -> None:
    from triton.runtime import interpreter

    launch_now = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        for index, arg in enumerate([*args, *kwargs.values()]):
            if any(isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor) for x in tree_leaves(arg)):
                raise ValueError(f"Pointer argument (at {index}) cannot be accessed from Triton (cpu tensor?)")
        there, named = tensors._there(args), tensors._there(kwargs)
        gpu().counts["launches"] += 1
        gpu().submit(lambda: launch_now(self, *there, **named))

    interpreter.GridExecutor.__call__ = launch


def _let_processes_share() -> None:
    driver = Driver()
    gpu_memory.open_driver = lambda: driver  # type: ignore[assignment]
    plain = torch.as_tensor

    def as_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, gpu_memory.GpuBytes):
            return driver.tensor_of(data)
        return plain(data, *args, **kwargs)

    torch.as_tensor = as_tensor


def _let_ucx_reach() -> None:
    """UCX is built without CUDA and must not get settings for it. It finds device memory in host memory."""
    if importlib.util.find_spec("ucxx") is None:
        return
    set_default_variable("UCX_MEMTYPE_CACHE", "n")
    from kvtransfer.transport import ucx_options

    ucx_options._CUDA_DEFAULTS.clear()
