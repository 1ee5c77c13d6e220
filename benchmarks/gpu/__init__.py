"""The GPU kernels against what the GPU can do, in one run: measures, writes the table of what was reached."""
