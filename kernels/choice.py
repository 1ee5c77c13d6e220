"""Which sibling computes: what was asked for, what this machine has, and why it is not the fast one when it is not."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from kernels.composed import ComposedDecoder
from kernels.cpu import native
from kernels.cpu.decoder import Borrowing, CpuDecoder, NativeModule, Threads, packed_size, unsupported
from kernels.decoder import ALONE, DecoderKernel, DecoderShape, DecoderWeights, Ranks
from kernels.reference import ReferenceOps

#: The first GPUs that convert 8-bit floats.
_FP8_CAPABILITY = (8, 9)


class KernelsUnavailable(Exception):
    """What was asked for cannot be had here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What to compute with. `auto` is Triton where the weights are on a GPU; elsewhere C++ where it is built and can
    run the model, else plain torch.
    """

    implementation: str = "auto"
    #: One of `instruction_sets()`; None: the best.
    instruction_set: str | None = None
    #: Compute threads of C++ kernels; None: as many as `cpus`, else as many as torch takes.
    num_threads: int | None = None
    #: Where they are pinned; empty: nowhere.
    cpus: tuple[int, ...] = ()
    #: Where they may spread to while those cores are idle; needs `cpus`, C++ only.
    borrowing: Borrowing | None = None
    #: "int8": weights are rounded to 8 bits with a scale per output feature; C++ only.
    quantization: str | None = None
    #: Triton only, C++ always is: a token's bits do not depend on the batch. False: faster.
    deterministic: bool = True
    #: Of a KV cache in float8_e4m3fn: float32 [num_layers, 2, num_kv_heads], what stored numbers are multiplied by.
    #: None: the cache has the weights' dtype. Triton and plain torch only.
    kv_scales: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What computes, for logs and metrics."""

    implementation: str
    instruction_set: str
    quantization: str
    #: Why it is plain torch; empty when it is not, or when that was asked for.
    reason: str
    #: "deterministic" or "fast" with Triton, else "".
    mode: str = ""
    #: Cores of other processes that it may borrow.
    borrow_cpus: tuple[int, ...] = ()


def instruction_sets() -> list[str]:
    """What the C++ kernels were built for and this machine has, best first; empty when they are not built."""
    module = native.load()
    return [] if module is None else cast(NativeModule, module).instruction_sets()


def packed_bytes(options: KernelOptions, shape: DecoderShape, dtype: torch.dtype, ranks: Ranks = ALONE) -> int:
    """Of the copies of a CPU's weights that `open_decoder` will make, nearly; 0 where weights are read as they are."""
    if options.implementation not in ("auto", "cpu") or _why_not_cpu(options, shape, torch.device("cpu"), ranks):
        return 0
    name = options.instruction_set or instruction_sets()[0]
    return packed_size(shape, dtype, int8=options.quantization == "int8", instruction_set=name)


def open_decoder(
    options: KernelOptions, shape: DecoderShape, weights: DecoderWeights, cos_sin: Tensor, ranks: Ranks = ALONE
) -> tuple[DecoderKernel, KernelChoice]:
    """Binds the chosen kernels to weights. `cos_sin`: float32 [max_positions, 2, head_dim].

    On several ranks `shape` and `weights` are one rank's, and all must choose alike.

    Raises `KernelsUnavailable`.
    """
    on_gpu = weights.norm.device.type == "cuda"
    if options.kv_scales is not None:
        _require_scales(options.kv_scales, shape, len(weights.layers))
    if options.implementation == "triton" or (options.implementation == "auto" and on_gpu):
        return _open_triton(options, shape, weights, cos_sin, ranks)
    reason = "" if options.implementation == "reference" else _why_not_cpu(options, shape, weights.norm.device, ranks)
    if options.implementation == "reference" or reason:
        wanted = "--kernels cpu" if options.implementation == "cpu" else options.quantization or options.instruction_set
        if wanted:
            advice = "" if options.kv_scales is None else f" Use either --kv-cache-dtype fp8_e4m3 or {wanted}."
            why = reason or "plain torch was asked for"
            raise KernelsUnavailable(f"{wanted} needs the C++ kernels: {why}.{advice}")
        choice = KernelChoice(implementation="reference", instruction_set="", quantization="", reason=reason)
        kv_scales = _on_device(options.kv_scales, weights)
        return ComposedDecoder(ReferenceOps(), shape, weights, cos_sin, ranks, kv_scales=kv_scales), choice
    found = instruction_sets()
    name = options.instruction_set or found[0]
    if name not in found:
        raise KernelsUnavailable(f"this machine does not run the instruction set {name!r}; it runs {', '.join(found)}.")
    num_threads = options.num_threads or len(options.cpus) or torch.get_num_threads()
    threads = Threads(count=num_threads)
    # Two threads on one core would wait for each other.
    if num_threads <= len(options.cpus):
        threads = Threads(count=num_threads, cpus=options.cpus, borrowing=options.borrowing)
    try:
        kernel = CpuDecoder(
            cast(NativeModule, native.load()),
            shape,
            weights,
            cos_sin,
            instruction_set=name,
            threads=threads,
            int8=options.quantization == "int8",
        )
    except (RuntimeError, MemoryError, ValueError) as error:
        raise KernelsUnavailable(f"the C++ kernels cannot start with {num_threads} threads: {error}.") from error
    choice = KernelChoice(
        implementation="cpu",
        instruction_set=name,
        quantization=options.quantization or "",
        reason="",
        borrow_cpus=() if threads.borrowing is None else threads.borrowing.cpus,
    )
    return kernel, choice


def _why_not_cpu(options: KernelOptions, shape: DecoderShape, device: torch.device, ranks: Ranks) -> str:
    if device.type != "cpu":
        return f"the model is on {device}"
    if ranks.size > 1:
        return f"{ranks.size} ranks share the model, and C++ computes a forward pass without talking to others"
    if options.kv_scales is not None:
        return "the C++ kernels have no fp8 KV cache (--kv-cache-dtype fp8_e4m3)"
    return native.missing_reason() or unsupported(shape, int8=options.quantization == "int8") or ""


def _open_triton(
    options: KernelOptions, shape: DecoderShape, weights: DecoderWeights, cos_sin: Tensor, ranks: Ranks
) -> tuple[DecoderKernel, KernelChoice]:
    device = weights.norm.device
    cpu_only = options.quantization or options.instruction_set
    if cpu_only:
        why = f"the model is on {device}" if device.type == "cuda" else "--kernels triton was asked for"
        raise KernelsUnavailable(f"{cpu_only} needs the C++ kernels: {why}.")
    reason = why_not_triton(device, fp8=options.kv_scales is not None)
    if reason:
        raise KernelsUnavailable(f"the Triton kernels cannot run: {reason}.")
    # Not before they are chosen: Triton takes a while to import.
    from kernels.triton.decoder import TritonDecoder
    from kernels.triton.decoder import unsupported as unsupported_by_triton
    from kernels.triton.ops import TritonOps

    too_much = unsupported_by_triton(shape)
    if too_much:
        raise KernelsUnavailable(f"the Triton kernels cannot run: {too_much}; --kernels reference can.")
    choice = KernelChoice(
        implementation="triton",
        instruction_set="",
        quantization="",
        reason="",
        mode="deterministic" if options.deterministic else "fast",
    )
    ops, kv_scales = TritonOps(deterministic=options.deterministic), _on_device(options.kv_scales, weights)
    return TritonDecoder(ops, shape, weights, cos_sin, ranks, kv_scales=kv_scales), choice


def why_not_triton(device: torch.device, *, fp8: bool) -> str:
    """Why the Triton kernels cannot run there, with an fp8 KV cache or without; empty when they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with pdserve[cuda12] and pdserve[cuda13]"
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"the model is on {device}, and Triton has no back end for it (for tests, TRITON_INTERPRET=1 has one)"
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
