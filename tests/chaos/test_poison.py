"""Requests under which real workers die: by a fault of their own, or killed from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.cpu import native
from tests.support.cluster import MODEL, Cluster, running_cluster
from tests.support.default_model import write_one_layer_model
from tests.support.depth import IS_FULL
from tests.support.lazily import openai
from tests.support.step_faults import MAX_KILLS, SEGFAULT, SIGKILLED, StepFaults

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="the C++ kernels, which have the handler, are not built"),
]

#: Only the full depth has a request that ends workers of both tiers.
PREFILL, DECODE = 3, 4 if IS_FULL else 1


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> StepFaults:
    return StepFaults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, faults: StepFaults) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("poison")
    model = str(write_one_layer_model(directory))
    flags = ("--prefill", str(PREFILL), "--decode", str(DECODE), "--kv-cache-memory", "16MiB", "--no-lend-cores")
    more = ("--threads-per-worker", "1", "--local-prefill", "threshold", "--local-prefill-threshold", "0")
    with running_cluster(directory, *flags, *more, model=model, **faults.environment()) as cluster:
        yield cluster


def _complete(cluster: Cluster, first: int) -> str:
    prompt = [first, *range(200, 300)]
    with cluster.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
    return answer.choices[0].text


def _pids(cluster: Cluster, tier: str) -> dict[str, int]:
    return {name: each.pid for name, each in cluster.processes().items() if name.startswith(tier)}


def test_a_request_whose_steps_segfault_ends_three_workers_of_one_tier_and_is_refused_then(
    cluster: Cluster, faults: StepFaults
) -> None:
    """Fails without the report of signals: no death counts, and workers of both tiers end."""
    cluster.wait_tiers(prefill=PREFILL, decode=DECODE)
    decode = _pids(cluster, "decode")
    with pytest.raises(openai.InternalServerError, match="3 workers have failed by themselves"):
        _complete(cluster, SEGFAULT)
    assert faults.deaths(SEGFAULT) == ["prefill"] * 3
    for _ in range(2):
        with pytest.raises(openai.UnprocessableEntityError, match="refused for another"):
            _complete(cluster, SEGFAULT)
    assert len(faults.deaths(SEGFAULT)) == 3
    assert _pids(cluster, "decode") == decode
    assert _complete(cluster, 100)


@pytest.mark.skipif(not IS_FULL, reason="one of many cases: `make test-all ARGS=chaos` runs it")
def test_a_request_that_loses_five_workers_to_sigkill_is_answered(cluster: Cluster, faults: StepFaults) -> None:
    cluster.wait_tiers(prefill=PREFILL, decode=DECODE)
    answer = _complete(cluster, SIGKILLED)
    assert len(faults.deaths(SIGKILLED)) == MAX_KILLS
    cluster.wait_tiers(prefill=PREFILL, decode=DECODE)
    assert _complete(cluster, SIGKILLED) == answer
