"""Found by processes that tests start: those that compute have the simulated GPU, too."""

from __future__ import annotations

import sys

if {"prefill_svc", "decode_svc", "benchmarks.gpu.handover"} & set(sys.orig_argv):
    import tests.support.devices  # noqa: F401
