"""Matrix products in Triton's interpreter, summed term by term in the order of the depth.

The interpreter leaves `tl.dot` to `numpy.matmul`, which is the machine's BLAS. Some of its kernels (those without
AVX-512) give a row other bits at another position of the matrix, so kernels whose rows keep their bits on a GPU would
lose them in a test. One multiplication and one addition at a time, each rounded, is the same on every machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


def install() -> None:
    """Replace the interpreter's product for floating-point tiles; those of integers are exact in any order."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    blas_dot = InterpreterBuilder.create_dot

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: object
    ) -> TensorHandle:
        operands = (a.data.dtype, b.data.dtype, d.data.dtype)
        if not all(np.issubdtype(dtype, np.floating) for dtype in operands) or a.data.ndim != 2:
            return blas_dot(self, a, b, d, *precision)
        return TensorHandle(dot(a.data, b.data, d.data), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def dot(a: Array, b: Array, d: Array) -> Array:
    """d + a @ b in the dtype of `d`. a: [m, k], b: [k, n], d: [m, n]."""
    total = d.copy()
    a, b = np.ascontiguousarray(a, d.dtype), np.ascontiguousarray(b, d.dtype)
    term = np.empty_like(total)
    for k in range(a.shape[1]):
        np.multiply(a[:, k, None], b[k], out=term)
        np.add(total, term, out=total)
    return total
