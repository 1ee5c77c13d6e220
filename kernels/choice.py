"""Chooses the backend of a decoder from the request and the machine, and gives the reason when it is plain torch."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from kernels.composed import ComposedDecoder
from kernels.cpu import native
from kernels.cpu.decoder import (
    Borrowing,
    CpuDecoder,
    NativeCode,
    NativeModule,
    ThreadCounters,
    Threads,
    packed_size,
    unsupported,
)
from kernels.cpu.sampling import RowSampler
from kernels.decoder import ALONE, DecoderKernel, DecoderShape, DecoderWeights, Ranks
from kernels.reference import ReferenceOps

#: Compute capability of the first GPUs that convert 8-bit floats.
_FP8_CAPABILITY = (8, 9)


class KernelsUnavailable(Exception):
    """The requested kernels cannot run here; the text says why."""


class Backend(StrEnum):
    """The implementations of a decoder."""

    #: Plain torch: the reference, and the fallback.
    REFERENCE = "reference"
    #: C++.
    CPU = "cpu"
    TRITON = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """The requested backend and its settings."""

    #: None: Triton where the weights are on a GPU, else C++ where it is built and can run the model, else plain torch.
    backend: Backend | None = None
    #: C++ only: one of `instruction_sets()`; None: the best.
    instruction_set: str | None = None
    #: C++ only: number of compute threads; None: one for each of `cpus`, else as many as torch takes. Torch knows no
    #: CPU quota, so a worker always gives the number.
    num_threads: int | None = None
    #: C++ only: cores to pin the threads to; empty: not pinned.
    cpus: tuple[int, ...] = ()
    #: C++ only: cores to spread to while they are idle; needs `cpus`.
    borrowing: Borrowing | None = None
    #: C++ only: "int8" rounds weights to 8 bits, with a scale per output feature.
    quantization: str | None = None
    #: Triton only, since C++ always is: a token's bits do not depend on the batch. False: faster.
    deterministic: bool = True
    #: Not for C++: scales of a KV cache in float8_e4m3fn, by which stored numbers are multiplied. Float32
    #: [num_layers, 2, num_kv_heads]; None: the cache has the weights' dtype.
    kv_scales: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The chosen backend and its settings, for logs and metrics."""

    backend: Backend
    instruction_set: str = ""
    quantization: str = ""
    #: Why it is plain torch; empty when it is another backend, or when plain torch was requested.
    reason: str = ""
    #: "deterministic" or "fast" with Triton, else "".
    mode: str = ""
    #: Whether deterministic Triton kernels take larger tiles for many rows.
    tall_tiles: bool = False
    #: Whether they compute the MLP's activation with its products.
    gated_products: bool = False
    #: Cores of other processes that it may borrow.
    borrow_cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDecoder:
    """A forward pass bound to weights."""

    kernel: DecoderKernel
    choice: KernelChoice
    #: None: the backend computes on the threads of its caller or on a GPU.
    thread_counters: ThreadCounters | None = None
    #: None: the backend does not sample.
    row_sampler: RowSampler | None = None


def instruction_sets() -> list[str]:
    """Instruction sets that the C++ kernels were built for and this machine has, best first; empty without C++."""
    module = native.load()
    return [] if module is None else cast(NativeModule, module).instruction_sets()


def packed_bytes(options: KernelOptions, shape: DecoderShape, dtype: torch.dtype, ranks: Ranks = ALONE) -> int:
    """Approximate size of the packed weights that `open_decoder` will make on a CPU; 0 if it reads them in place."""
    if _choose(options, shape, torch.device("cpu"), ranks)[0] is not Backend.CPU:
        return 0
    name = options.instruction_set or instruction_sets()[0]
    return packed_size(shape, dtype, int8=options.quantization == "int8", instruction_set=name)


def open_decoder(
    options: KernelOptions, shape: DecoderShape, weights: DecoderWeights, cos_sin: Tensor, ranks: Ranks = ALONE
) -> OpenedDecoder:
    """Binds the chosen backend to weights. `cos_sin`: float32 [max_positions, 2, head_dim].

    On several ranks, `shape` and `weights` are one rank's, and all ranks must choose the same backend.

    Raises `KernelsUnavailable`.
    """
    if options.kv_scales is not None:
        _require_scales(options.kv_scales, shape, len(weights.layers))
    backend, reason = _choose(options, shape, weights.norm.device, ranks)
    if backend is Backend.TRITON:
        return _open_triton(options, shape, weights, cos_sin, ranks)
    if backend is Backend.CPU:
        return _open_cpu(options, shape, weights, cos_sin)
    return _open_reference(options, shape, weights, cos_sin, ranks, reason=reason)


def _choose(options: KernelOptions, shape: DecoderShape, device: torch.device, ranks: Ranks) -> tuple[Backend, str]:
    """The backend, and why it is plain torch although that was not requested."""
    if options.backend is Backend.TRITON or (options.backend is None and device.type == "cuda"):
        return Backend.TRITON, ""
    if options.backend is Backend.REFERENCE:
        return Backend.REFERENCE, ""
    reason = _why_not_cpu(options, shape, device, ranks)
    return (Backend.REFERENCE, reason) if reason else (Backend.CPU, "")


def _open_reference(
    options: KernelOptions,
    shape: DecoderShape,
    weights: DecoderWeights,
    cos_sin: Tensor,
    ranks: Ranks,
    *,
    reason: str,
) -> OpenedDecoder:
    cpu_only = "--kernels cpu" if options.backend is Backend.CPU else options.quantization or options.instruction_set
    if cpu_only:
        advice = "" if options.kv_scales is None else f" Use either --kv-cache-dtype fp8_e4m3 or {cpu_only}."
        why = reason or "plain torch was requested"
        raise KernelsUnavailable(f"{cpu_only} needs the C++ kernels: {why}.{advice}")
    kv_scales = _on_device(options.kv_scales, weights)
    return OpenedDecoder(
        kernel=ComposedDecoder(ReferenceOps(), shape, weights, cos_sin, ranks, kv_scales=kv_scales),
        choice=KernelChoice(backend=Backend.REFERENCE, reason=reason),
    )


def _open_cpu(options: KernelOptions, shape: DecoderShape, weights: DecoderWeights, cos_sin: Tensor) -> OpenedDecoder:
    available = instruction_sets()
    name = options.instruction_set or available[0]
    if name not in available:
        raise KernelsUnavailable(
            f"this machine does not run the instruction set {name!r}; it runs {', '.join(available)}."
        )
    threads = _threads(options)
    module = cast(NativeModule, native.load())
    code = NativeCode(module=module, instruction_set=name, int8=options.quantization == "int8")
    try:
        kernel = CpuDecoder(shape, weights, cos_sin, code=code, threads=threads)
    except (RuntimeError, MemoryError, ValueError) as error:
        raise KernelsUnavailable(f"the C++ kernels cannot start with {threads.count} threads: {error}.") from error
    choice = KernelChoice(
        backend=Backend.CPU,
        instruction_set=name,
        quantization=options.quantization or "",
        borrow_cpus=() if threads.borrowing is None else threads.borrowing.cpus,
    )
    return OpenedDecoder(kernel=kernel, choice=choice, thread_counters=kernel, row_sampler=kernel.row_sampler)


def _threads(options: KernelOptions) -> Threads:
    """Pinned only if each thread has a core of its own: two threads on one core would wait for each other."""
    count = options.num_threads or len(options.cpus) or torch.get_num_threads()
    if count > len(options.cpus):
        return Threads(count=count)
    return Threads(count=count, cpus=options.cpus, borrowing=options.borrowing)


def _why_not_cpu(options: KernelOptions, shape: DecoderShape, device: torch.device, ranks: Ranks) -> str:
    """Empty when the C++ kernels can run the model."""
    if device.type != "cpu":
        return f"the model is on {device}"
    if ranks.size > 1:
        return f"{ranks.size} ranks share the model, and the C++ kernels do not exchange sums between ranks"
    if options.kv_scales is not None:
        return "the C++ kernels have no fp8 KV cache (--kv-cache-dtype fp8_e4m3)"
    return native.missing_reason() or unsupported(shape, int8=options.quantization == "int8") or ""


def _open_triton(
    options: KernelOptions, shape: DecoderShape, weights: DecoderWeights, cos_sin: Tensor, ranks: Ranks
) -> OpenedDecoder:
    device = weights.norm.device
    cpu_only = options.quantization or options.instruction_set
    if cpu_only:
        why = f"the model is on {device}" if device.type == "cuda" else "--kernels triton was requested"
        raise KernelsUnavailable(f"{cpu_only} needs the C++ kernels: {why}.")
    reason = why_not_triton(device, fp8=options.kv_scales is not None)
    if reason:
        raise KernelsUnavailable(f"the Triton kernels cannot run: {reason}.")
    # Imported only once it is chosen: Triton takes a while to import.
    from kernels.triton.decoder import TritonDecoder
    from kernels.triton.decoder import unsupported as unsupported_by_triton
    from kernels.triton.ops import TritonOps
    from kernels.triton.tile_check import gated_products_agree, tall_tiles_agree

    limit = unsupported_by_triton(shape)
    if limit:
        raise KernelsUnavailable(f"the Triton kernels cannot run: {limit}; --kernels reference can.")
    mode = "deterministic" if options.deterministic else "fast"
    # A rank has a slice of the vocabulary.
    tried = (replace(shape, vocab_size=len(weights.lm_head)), weights.norm.dtype, device)
    is_tried = options.deterministic and device.type == "cuda"
    tall_tiles = is_tried and tall_tiles_agree(*tried, has_fp8_kv=options.kv_scales is not None)
    gated_products = is_tried and gated_products_agree(*tried, tall_tiles=tall_tiles)
    ops = TritonOps(deterministic=options.deterministic, tall_tiles=tall_tiles, gated_products=gated_products)
    kv_scales = _on_device(options.kv_scales, weights)
    return OpenedDecoder(
        kernel=TritonDecoder(ops, shape, weights, cos_sin, ranks, kv_scales=kv_scales),
        choice=KernelChoice(backend=Backend.TRITON, mode=mode, tall_tiles=tall_tiles, gated_products=gated_products),
    )


def why_not_triton(device: torch.device, *, fp8: bool) -> str:
    """Why the Triton kernels cannot run on `device`, with an fp8 KV cache or without; empty when they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with pdserve[cuda12] and pdserve[cuda13]"
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"the model is on {device}, which Triton cannot compile for (in tests, set TRITON_INTERPRET=1)"
    if device.type == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "Triton builds its launcher with a C compiler, and there is none: install gcc"
    if device.type == "cuda" and not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton builds its launcher with Python's headers, which are missing: install python3-dev or the like"
    if fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return f"{device} has no fp8 (compute capability 8.9 and above): leave --kv-cache-dtype fp8_e4m3 out"
    return ""


def _on_device(kv_scales: Tensor | None, weights: DecoderWeights) -> Tensor | None:
    return None if kv_scales is None else kv_scales.to(weights.norm.device)


def _require_scales(kv_scales: Tensor, shape: DecoderShape, num_layers: int) -> None:
    assert kv_scales.dtype == torch.float32
    assert kv_scales.shape == (num_layers, 2, shape.num_kv_heads)
    assert bool((kv_scales > 0).all())
