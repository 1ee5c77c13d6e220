"""Device of the tests of GPU kernels: a GPU if present, else Triton's interpreter. Import it before kernels."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.support import interpreted_language, interpreted_products

#: PDSERVE_TEST_GPU=simulated: `tests.support.simulated_gpu` takes a GPU's place, unless torch could have a real one.
#: In simulated:0.9:7, 0.9 is the probability, from 0 to 1, that work is done before it is waited for; 7 is the seed.
_name, *_how = os.environ.get("PDSERVE_TEST_GPU", "").split(":")
SIMULATED = _name == "simulated" and torch.version.cuda is None
if SIMULATED:
    # Triton reads it when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support import simulated_gpu

    simulated_gpu.install(*map(float, _how))

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
if not HAS_GPU:
    # Triton reads it when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and (SIMULATED or not HAS_GPU):
    interpreted_products.install()
    interpreted_language.install()
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
#: Marks tests of what only real hardware shows: bits, speed, graphs, memory.
gpu_only = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]


def keep_busy() -> None:
    """Occupies the device for about a quarter of a second, or if simulated, until the host waits for it.

    What a call does at its first use (memory that is pinned, modules that are loaded) can take longer: use it before.
    """
    torch.cuda._sleep(500_000_000)
