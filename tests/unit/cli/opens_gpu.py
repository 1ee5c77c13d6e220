"""A module that opens a GPU when it is imported: a file in memory stands in for the GPU's."""

from __future__ import annotations

import os

from pdserve.base import gpu_files

gpu_files._GPU_FILES = ("/memfd:gpu",)
DESCRIPTOR = os.memfd_create("gpu")
