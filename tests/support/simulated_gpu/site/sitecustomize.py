"""Imported by child processes of tests: installs the simulated GPU in those that compute."""

from __future__ import annotations

import sys

if {"prefill_svc", "decode_svc", "benchmarks.gpu.handover"} & set(sys.orig_argv):
    import tests.support.devices  # noqa: F401
