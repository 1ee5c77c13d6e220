"""Imported by the processes of a cluster that has a prefill gate."""

from __future__ import annotations

import sys

if {"prefill_svc", "worker_svc.prefill"} & set(sys.orig_argv):
    from tests.support import prefill_gate

    prefill_gate.install()
