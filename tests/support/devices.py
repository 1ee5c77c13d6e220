"""Where GPU kernels are tested: on a GPU when there is one, else in Triton's interpreter. Import it before kernels."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
if not HAS_GPU:
    # Read when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
#: What only real hardware can show: bits, speed, graphs, memory.
gpu_only = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]
