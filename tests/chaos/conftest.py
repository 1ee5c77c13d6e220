"""A cluster for fault injection: two prefill workers and one decode worker, checked after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, running_cluster
from tests.support.default_model import EXACT_DTYPE, model_for_depth, write_one_layer_model
from tests.support.prefill_gate import PrefillGate

#: Set to "one-layer" by `tests.machines`: clusters serve a model whose steps take next to no time.
_MODEL_VARIABLE = "PDSERVE_TEST_MODEL"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model to start clusters with. Clients call it `MODEL` in any case."""
    if os.environ.get(_MODEL_VARIABLE) == "one-layer":
        return str(write_one_layer_model(tmp_path_factory.mktemp("one-layer")))
    return model_for_depth(tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="session")
def prefill_gate(tmp_path_factory: pytest.TempPathFactory) -> PrefillGate:
    """Holds the fragile cluster's prefill workers in the middle of a prompt."""
    return PrefillGate(tmp_path_factory.mktemp("prefill-gate"))


@pytest.fixture(scope="session")
def shared_fragile(
    tmp_path_factory: pytest.TempPathFactory, prefill_gate: PrefillGate, model: str
) -> Iterator[Cluster]:
    """Small chunks, so that faults occur between chunks of a long prompt; a short lease, so that tests end soon."""
    flags = ("--dtype", EXACT_DTYPE, "--kv-cache-memory", "256MiB", "--prefill", "2", "--max-num-batched-tokens", "64")
    flags += ("--trust-request-chat-template",)
    # Streams have ids, which clients that do not resume ignore.
    environment = {"PDSERVE_DECODE__LEASE_S": "5", "PDSERVE_ROUTER__RESUME_TIMEOUT_S": "60"}
    environment |= prefill_gate.environment()
    with running_cluster(tmp_path_factory.mktemp("fragile"), *flags, model=model, **environment) as cluster:
        yield cluster


@pytest.fixture
def fragile(shared_fragile: Cluster) -> Iterator[Cluster]:
    """The cluster, with all workers ready and idle before and after each test."""
    shared_fragile.wait_tiers(prefill=2, decode=1)
    shared_fragile.wait_idle()
    yield shared_fragile
    shared_fragile.wait_tiers(prefill=2, decode=1)
    shared_fragile.wait_idle()
