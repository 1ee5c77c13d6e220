"""A worker of several ranks serves like any other, and is replaced as a whole when one of its processes dies."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.support.cluster import MODEL, READY_S, Cluster, running_cluster
from tests.support.default_model import write_first_layers
from tests.support.depth import IS_FULL

pytestmark = [
    pytest.mark.skipif(not IS_FULL, reason="starts six processes: `make test-all ARGS=chaos` runs it"),
]

#: A divisor of the default model's nine heads, three KV heads and vocabulary.
RANKS = 3


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill worker of one rank, and a decode worker of three ranks, which also computes small prompts."""
    flags = ("--dtype", "float32", "--kv-cache-memory", "64MiB", "--decode-tensor-parallel-size", str(RANKS))
    model = write_first_layers(tmp_path_factory.mktemp("model"))
    with running_cluster(tmp_path_factory.mktemp("split"), *flags, model=model) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def answer(split: Cluster) -> str:
    """What the workers answer before one of their processes is lost."""
    return ask(split)


def ask(cluster: Cluster) -> str:
    prompt = " ".join(["The capital of France is Paris. The capital of Italy is Rome."] * 8)
    with cluster.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt=f"{prompt} The capital of Germany is", max_tokens=6, temperature=0
        )
    return answer.choices[0].text


def followers(cluster: Cluster) -> list[psutil.Process]:
    return cluster.processes()["decode-0"].children()


def test_a_prompt_is_handed_over_to_all_ranks(split: Cluster, answer: str) -> None:
    assert answer
    [worker] = split.workers("decode")
    assert split.metric(worker.http_address, "pdserve_worker_info", tensor_parallel_size=str(RANKS)) == 1
    assert split.worker_metric("decode", "pdserve_kv_transfers_total", outcome="committed") > 0
    split.wait_idle()


def test_a_lost_rank_ends_its_worker_which_is_restarted(split: Cluster, answer: str) -> None:
    [before] = split.workers("decode")
    ranks = [split.processes()["decode-0"], *followers(split)]
    assert len(ranks) == RANKS
    ranks[1].kill()
    split.until(lambda: not any(map(is_alive, ranks)), "all ranks have ended")
    split.until(
        # The router may still list the old worker.
        lambda: [worker for worker in split.workers("decode") if worker.http_address != before.http_address],
        "the worker is restarted",
        timeout_s=READY_S,
    )
    assert ask(split) == answer
    split.wait_idle()


def test_all_ranks_end_with_rank_0(split: Cluster) -> None:
    ranks = [split.processes()["decode-0"], *followers(split)]
    ranks[0].kill()
    split.until(lambda: not any(map(is_alive, ranks)), "all ranks have ended")


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
