"""Triton kernels for NVIDIA GPUs; without one they run in Triton's interpreter, for tests."""
