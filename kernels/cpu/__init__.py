"""The C++ backend: `src/` has the code, the installation builds it, `native.py` loads it."""
