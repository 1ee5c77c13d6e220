"""Tensors of the simulated GPU: torch sees them on `cuda:0`; their bytes are in host memory.

Each op is checked for memory that a GPU could not access. It returns a tensor of the right shape full of garbage, and
is computed when its stream gets there. Freed memory is overwritten when the stream of its allocation gets there. A
stream that still reads it then finds garbage, as it would find new data in memory that torch's allocator reused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.support.simulated_gpu.streams import Stream, gpu

DEVICE = torch.device("cuda", 0)
#: Each byte of memory that has not been written to: NaN as a number, -1 as an index.
GARBAGE = 0xFF

_aten = torch.ops.aten
#: Ops whose results, or the results' shapes, depend on values: the host waits for them.
_ANSWERS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default, _aten.nonzero.default}


class Memory:
    """An allocation, which all views of a tensor share."""

    total_bytes = 1 << 30
    allocated = 0
    peak = 0

    def __init__(self, num_bytes: int) -> None:
        with gpu().lock:
            if Memory.allocated + num_bytes > Memory.total_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")
            gpu().counts["allocations"] += 1
            Memory.allocated += num_bytes
            Memory.peak = max(Memory.peak, Memory.allocated)
        self.bytes = torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)
        stream = gpu().stream
        if stream.recording is not None:
            memory = self.bytes
            stream.overwrites.append(lambda: memory.fill_(GARBAGE))
        weakref.finalize(self, _free, self.bytes, stream, stream.recording).atexit = False


def _free(memory: torch.Tensor, stream: Stream, recording: list[Callable[[], None]] | None) -> None:
    """Overwrites memory on the stream of its allocation. Memory of a graph is reused only within the graph."""
    with gpu().lock:
        Memory.allocated -= memory.nbytes
    overwrite = lambda: memory.fill_(GARBAGE)  # noqa: E731
    if recording is not None:
        if stream.recording is recording:
            recording.append(overwrite)
    elif stream.recording is None:
        gpu().submit(overwrite, stream)


class DeviceTensor(torch.Tensor):
    """`there`: the same bytes as a host tensor, which only work in streams may access."""

    there: torch.Tensor
    memory: object

    @staticmethod
    def __new__(cls, there: torch.Tensor, memory: object) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            there.shape,
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=DEVICE,
        )
        tensor.there, tensor.memory = there, memory
        return tensor

    def data_ptr(self) -> int:
        return self.there.data_ptr()

    def untyped_storage(self) -> Any:
        return self.there.untyped_storage()

    def record_stream(self, stream: object) -> None:
        raise NotImplementedError("the simulated GPU frees memory on the stream of its allocation only")

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def allocate(size: Any, stride: Any, dtype: torch.dtype) -> DeviceTensor:
    """A new tensor full of garbage."""
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    memory = Memory(span * dtype.itemsize)
    return DeviceTensor(torch.as_strided(memory.bytes.view(dtype), size, stride), memory)


# Pinned memory.
_pinned: dict[int, int] = {}


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor's memory as pinned, so that copies from and to it may be asynchronous."""
    gpu().counts["pinned allocations"] += 1
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    _pinned[start] = storage.nbytes()
    weakref.finalize(storage, _pinned.pop, start, None).atexit = False
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DeviceTensor) and any(
        start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + size
        # A copy, because other threads pin, and finalizers unpin while it is read.
        for start, size in _pinned.copy().items()
    )


# Ops.
def _run(func: Any, args: Any, kwargs: Any) -> Any:
    if func is _aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is _aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is _aten.is_pinned.default:
        return False
    if func in _ANSWERS:
        gpu().finish_for(func)
        answer = func(*_there(args), **_there(kwargs))
        return _on_device(answer) if isinstance(answer, torch.Tensor) else answer
    # In inference mode torch leaves decomposition to us.
    result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    _require_same_device(func, args, kwargs)
    returns = func._schema.returns
    aliases = [each.alias_info for each in returns]
    if any(alias is not None and not alias.is_write for alias in aliases):
        return _view(func, args, kwargs)
    inner = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if any(alias is not None for alias in aliases):
        return _write(func, args, inner)
    return _compute(func, args, inner)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    base = next(each for each in tree_flatten((args, kwargs))[0] if isinstance(each, DeviceTensor))
    views = func(*_there(args), **_there(kwargs))
    # A view of a normal tensor may be written to outside of inference mode, as torch's own views.
    with torch.inference_mode(base.is_inference()):
        return tree_map_only(torch.Tensor, lambda there: DeviceTensor(there, base.memory), views)


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    there_args, there_kwargs = _there(args), _there(kwargs)
    gpu().submit(lambda: func(*there_args, **there_kwargs))
    written = [
        value
        for argument, value in _bound(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[0] if len(written) == 1 else tuple(written)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    there_args, there_kwargs = _there(args), _there(kwargs)
    shapes = func(*_meta(args), **_meta(kwargs))
    results = tree_map_only(torch.Tensor, lambda t: allocate(t.shape, t.stride(), t.dtype), shapes)
    given = [each.there for each in tree_flatten(results)[0] if isinstance(each, DeviceTensor)]

    def work() -> None:
        computed = tree_flatten(func(*there_args, **there_kwargs))[0]
        for to, source in zip(given, computed, strict=True):
            to.copy_(source)

    gpu().submit(work)
    return results


def _to_copy(source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    device = kwargs.get("device") or source.device
    dtype = kwargs.get("dtype") or source.dtype
    non_blocking = bool(kwargs.get("non_blocking"))
    shape = torch.empty_like(torch.empty_strided(source.shape, source.stride(), device="meta"))
    if device.type == "cuda":
        to: torch.Tensor = allocate(shape.shape, shape.stride(), dtype)
    else:
        to = torch.empty_strided(shape.shape, shape.stride(), dtype=dtype)
        if non_blocking:
            pin(to)
    return _copy(to, source, non_blocking)


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(to, DeviceTensor) and isinstance(source, DeviceTensor):
        there, from_there = to.there, source.there
        gpu().submit(lambda: there.copy_(from_there))
        return to
    here = source if isinstance(to, DeviceTensor) else to
    is_late = non_blocking and is_pinned(here)
    if not is_late:
        gpu().refuse_in_capture("a copy from or to memory that is not pinned, or that is waited for")
    if isinstance(to, DeviceTensor):
        there, given = to.there, source if is_late else source.clone()
        gpu().submit(lambda: there.copy_(given))
    else:
        assert isinstance(source, DeviceTensor)
        from_there = source.there
        gpu().submit(lambda: to.copy_(from_there))
    if not is_late and not (non_blocking and isinstance(to, DeviceTensor)):
        gpu().finish_for("a copy")
    return to


def _on_device(answer: torch.Tensor) -> DeviceTensor:
    result = allocate(answer.shape, answer.stride(), answer.dtype)
    gpu().submit(lambda: result.there.copy_(answer))
    return result


def _require_same_device(func: Any, args: Any, kwargs: Any) -> None:
    """Allows scalars of the host. Torch also accepts host indices, and waits for them: here they are refused."""
    for tensor in tree_flatten((args, kwargs))[0]:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DeviceTensor) and tensor.ndim:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu: {func}"
            )


def _bound(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    arguments = func._schema.arguments
    given = list(zip(arguments, args, strict=False))
    return given + [(each, kwargs[each.name]) for each in arguments[len(args) :] if each.name in kwargs]


def _there(tree: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda tensor: tensor.there, tree)


def _meta(tree: Any) -> Any:
    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return tree_map_only(DeviceTensor, meta, tree)
