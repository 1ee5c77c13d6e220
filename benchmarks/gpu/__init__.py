"""Compares the GPU kernels with the limits of the GPU in one run: measures, and writes the table of results."""
