"""The clusters that integration tests share, started once, and the check after each test that nothing was leaked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, Footprint, running_cluster

#: Exact where library kernels can be, and small enough for several clusters on one machine.
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "512MiB")
#: Connections that a process may keep open for the next request: to clients, to other processes, to Redis.
_FD_SLACK = 16
#: Pools (gRPC, the event loop's executor) that grow to a fixed size with first use.
_THREAD_SLACK = 24


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker, float32."""
    with running_cluster(
        tmp_path_factory.mktemp("cluster"), "--dtype", "float32", "--kv-cache-memory", "512MiB"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_monolith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The decode tier alone, float32: what disaggregated output is compared with."""
    with running_cluster(
        tmp_path_factory.mktemp("monolith"), "--dtype", "float32", "--kv-cache-memory", "512MiB", "--prefill", "0"
    ) as cluster:
        yield cluster


_baselines: dict[int, dict[str, Footprint]] = {}


def _checked(cluster: Cluster) -> Iterator[Cluster]:
    """Everything must be given back after the test: blocks, leases, requests, descriptors, threads, processes."""
    if cluster.process.pid not in _baselines:
        # Pools and caches fill with the first use, which is no leak.
        cluster.client().completions.create(model="smollm2-135m-instruct", prompt="Warm " * 200, max_tokens=2)
        cluster.wait_idle()
        _baselines[cluster.process.pid] = cluster.footprint()
    yield cluster
    cluster.wait_idle()
    baseline = _baselines[cluster.process.pid]
    cluster.until(lambda: not _grown(baseline, cluster.footprint()), "descriptors, threads and processes as before")


def _grown(before: dict[str, Footprint], now: dict[str, Footprint]) -> dict[str, tuple[Footprint, Footprint]]:
    return {
        name: (before[name], now[name])
        for name in before
        if name not in now
        or now[name].fds > before[name].fds + _FD_SLACK
        or now[name].threads > before[name].threads + _THREAD_SLACK
        or now[name].children > before[name].children
    }


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, with the leak check."""
    yield from _checked(shared_cluster)


@pytest.fixture
def monolith(shared_monolith: Cluster) -> Iterator[Cluster]:
    """The shared `--prefill 0` cluster, with the leak check."""
    yield from _checked(shared_monolith)
