"""The truth: every op in plain torch, on any device."""

from kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceOps"]
