"""The backends of the decoder that this machine can run."""

from __future__ import annotations

from kernels.choice import Backend, KernelOptions, instruction_sets

#: Plain torch. The bits of its library kernels may depend on the batch, so results are only close.
REFERENCE = KernelOptions(backend=Backend.REFERENCE)
#: Instruction sets of the C++ kernels that this machine supports, best first. Their bits are guaranteed.
INSTRUCTION_SETS = tuple(instruction_sets())


def native(instruction_set: str, *, quantization: str | None = None, num_threads: int = 1) -> KernelOptions:
    """The C++ kernels on one instruction set."""
    return KernelOptions(
        backend=Backend.CPU, instruction_set=instruction_set, quantization=quantization, num_threads=num_threads
    )
