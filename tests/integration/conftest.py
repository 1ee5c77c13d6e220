"""The clusters and the Redis that integration tests share, each started once, and the leak check after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, Footprint, running_cluster
from tests.support.default_model import EXACT_DTYPE, model_for_depth
from tests.support.redis import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]

#: The caches are just large enough for the longest context of the whole model in float32.
_FLAGS = ("--dtype", EXACT_DTYPE, "--kv-cache-memory", "384MiB", "--trust-request-chat-template")
#: Connections that a process may keep open for later requests: to clients, other processes and Redis.
_FD_SLACK = 16
#: Threads of pools that grow to a fixed size as they are used: gRPC, the event loop's executor.
_THREAD_SLACK = 24


@pytest.fixture(scope="session")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the shared clusters serve: at full depth the default model, else its first layers, which cost less."""
    return model_for_depth(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, shared_model: str) -> Iterator[Cluster]:
    """One prefill and one decode worker."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), *_FLAGS, model=shared_model) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_monolith(tmp_path_factory: pytest.TempPathFactory, shared_model: str) -> Iterator[Cluster]:
    """The decode tier alone: the reference for disaggregated output."""
    flags = (*_FLAGS, "--prefill", "0")
    with running_cluster(tmp_path_factory.mktemp("monolith"), *flags, model=shared_model) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def eloquent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The whole default model, for tests of what it says."""
    with running_cluster(tmp_path_factory.mktemp("eloquent"), "--kv-cache-memory", "64MiB") as cluster:
        yield cluster


_baselines: dict[int, dict[str, Footprint]] = {}


def _checked(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, and after the test the check that it has released everything.

    That is blocks, leases, requests, descriptors, threads and processes.
    """
    if cluster.process.pid not in _baselines:
        # Pools and caches fill with first use. That is not a leak.
        cluster.client().completions.create(model="smollm2-135m-instruct", prompt="Warm " * 200, max_tokens=2)
        cluster.wait_idle()
        _baselines[cluster.process.pid] = cluster.footprint()
    yield cluster
    cluster.wait_idle()
    baseline = _baselines[cluster.process.pid]
    cluster.until(
        lambda: not _grown(baseline, cluster.footprint()), "the descriptors, threads and processes of before the test"
    )


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
