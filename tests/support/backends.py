"""The backends of the decoder that this machine can run."""

from __future__ import annotations

from kernels.choice import Backend, KernelOptions, instruction_sets

#: Plain torch. Library kernels are behind it, and their bits may depend on the batch: it comes close, no more.
REFERENCE = KernelOptions(backend=Backend.REFERENCE)
#: Every instruction set that the C++ kernels run on here, best first. Their bits are promised.
INSTRUCTION_SETS = tuple(instruction_sets())


def native(instruction_set: str, *, quantization: str | None = None, num_threads: int = 1) -> KernelOptions:
    """The C++ kernels on one instruction set."""
    return KernelOptions(
        backend=Backend.CPU, instruction_set=instruction_set, quantization=quantization, num_threads=num_threads
    )
