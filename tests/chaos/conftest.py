"""A cluster to break: two prefill workers and one decode worker, checked after each test as the shared ones are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, running_cluster


@pytest.fixture(scope="session")
def shared_fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Small chunks, so that a long prompt is in many pieces when something breaks; a short lease, so that tests end."""
    flags = ("--dtype", "float32", "--kv-cache-memory", "512MiB", "--prefill", "2", "--max-num-batched-tokens", "64")
    with running_cluster(tmp_path_factory.mktemp("fragile"), *flags, PDSERVE_DECODE__LEASE_S="5") as cluster:
        yield cluster


@pytest.fixture
def fragile(shared_fragile: Cluster) -> Iterator[Cluster]:
    """Whole again before and after each test, and idle: nothing lost, nothing leaked."""
    shared_fragile.wait_tiers(prefill=2, decode=1)
    shared_fragile.wait_idle()
    yield shared_fragile
    shared_fragile.wait_tiers(prefill=2, decode=1)
    shared_fragile.wait_idle(timeout_s=40)
