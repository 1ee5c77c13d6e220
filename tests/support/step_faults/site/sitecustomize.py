"""Imported by the processes of a cluster whose workers fail on purpose."""

from __future__ import annotations

import sys

for tier in ("prefill", "decode"):
    if {f"{tier}_svc", f"worker_svc.{tier}"} & set(sys.orig_argv):
        from tests.support import step_faults

        step_faults.install(tier)
