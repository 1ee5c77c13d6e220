"""Imported by child processes of tests: installs the simulated GPU in those that compute."""

from __future__ import annotations

import sys

_COMPUTE = {"prefill_svc", "decode_svc", "benchmarks.gpu.handover", "pdserve.cli.supervisor.forking"}

if _COMPUTE & set(sys.orig_argv):
    import tests.support.devices  # noqa: F401
