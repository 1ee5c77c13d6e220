"""Where GPU kernels are tested: on a GPU when there is one, else in Triton's interpreter. Import it before kernels."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.support import interpreted_products

#: PDSERVE_TEST_GPU=simulated: `tests.support.simulated_gpu` takes a GPU's place, unless torch could have a real one.
#: simulated:0.9:7 says how much is done before anybody waits for it, from 0 to 1, and seeds the rest.
_name, *_how = os.environ.get("PDSERVE_TEST_GPU", "").split(":")
SIMULATED = _name == "simulated" and torch.version.cuda is None
if SIMULATED:
    # Read when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support import simulated_gpu

    simulated_gpu.install(*map(float, _how))

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
if not HAS_GPU:
    # Read when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and (SIMULATED or not HAS_GPU):
    interpreted_products.install()
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
#: What only real hardware can show: bits, speed, graphs, memory.
gpu_only = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]


def keep_busy() -> None:
    """Gives the device some hundredths of a second to do, or, when it is simulated, until somebody waits for it."""
    torch.cuda._sleep(50_000_000)
