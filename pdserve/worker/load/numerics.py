"""The numerics class of a worker: all settings on which the bits of its output depend, beside its KV layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.choice import Backend, KernelChoice
from pdserve import __version__
from pdserve.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsClass:
    """Workers of equal class and equal KV layout compute equal bits from equal tokens."""

    #: "cpu", or the name and compute capability of a GPU, such as "cuda-9.0".
    device: str
    kernels: KernelChoice
    #: Type of the stored KV. Weights that are not quantized follow from the layout's fingerprint and this.
    kv_dtype: str
    #: Ranks of tensor parallelism: they decide the order of sums.
    num_ranks: int
    #: Versions of pdserve and torch.
    version: str
    torch_version: str

    def __str__(self) -> str:
        """A short text without spaces, such as "cpu/avx512/bfloat16/kv-bfloat16/tp1/pdserve-0.9.0"."""
        kernels, weights = self.kernels, self.kernels.quantization or self.kv_dtype
        code = f"pdserve-{self.version}"
        if kernels.backend is not Backend.CPU:
            code = f"{code}/torch-{self.torch_version}"
        arithmetic = kernels.instruction_set or kernels.backend
        pieces = (self.device, arithmetic, kernels.mode, weights, f"kv-{self.kv_dtype}", f"tp{self.num_ranks}", code)
        return "/".join(filter(None, pieces))


def numerics_class(config: WorkerConfig, kernels: KernelChoice, kv_dtype: str) -> NumericsClass:
    """The numerics class of a worker, from the kernels and the device that it really uses."""
    device = config.device
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability()
        device = f"cuda-{major}.{minor}"
    return NumericsClass(
        device=device,
        kernels=kernels,
        kv_dtype=kv_dtype,
        num_ranks=config.tensor_parallel_size,
        version=__version__,
        torch_version=torch.__version__,
    )
