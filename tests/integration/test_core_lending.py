"""Two workers with a core each, and a request for which only one of them computes at a time."""

from __future__ import annotations

import os

import pytest

from kernels.choice import instruction_sets
from tests.support.cluster import MODEL, Cluster

pytestmark = [
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="workers on one core have none to lend"),
    pytest.mark.skipif(not instruction_sets(), reason="no C++ kernels"),
]


def test_each_tier_borrows_the_core_of_the_other_while_it_is_idle(cluster: Cluster) -> None:
    tiers = ("prefill", "decode")
    before = [cluster.worker_metric(tier, "pdserve_borrowed_core_seconds_total") for tier in tiers]
    prompt = [index % 1000 + 5000 for index in range(400)]
    cluster.client().completions.create(model=MODEL, prompt=prompt, max_tokens=20, temperature=0)
    cluster.wait_idle()
    after = [cluster.worker_metric(tier, "pdserve_borrowed_core_seconds_total") for tier in tiers]
    assert all(later > earlier for later, earlier in zip(after, before, strict=True)), (before, after)


def test_the_cores_a_worker_may_borrow_are_logged_at_start(cluster: Cluster) -> None:
    assert any("prefill-0: " in line and "when idle" in line for line in cluster.lines)
    assert "borrow_cpus=" in (cluster.log_dir / "decode-0.log").read_text()
