"""A worker of several ranks serves like any other, and whichever of its processes is lost, all of it is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.support.cluster import MODEL, Cluster, running_cluster

pytestmark = pytest.mark.timeout(300)

#: What the default model's nine heads, three KV heads and vocabulary can be split by.
RANKS = 3


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill worker of one rank, and a decode worker of three, which computes small prompts and all tokens."""
    flags = ("--dtype", "float32", "--kv-cache-memory", "256MiB", "--decode-tensor-parallel-size", str(RANKS))
    with running_cluster(tmp_path_factory.mktemp("split"), *flags) as cluster:
        yield cluster


def ask(cluster: Cluster) -> str:
    prompt = " ".join(["The capital of France is Paris. The capital of Italy is Rome."] * 8)
    with cluster.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt=f"{prompt} The capital of Germany is", max_tokens=6, temperature=0
        )
    return answer.choices[0].text


def followers(cluster: Cluster) -> list[psutil.Process]:
    return cluster.processes()["decode-0"].children()


def test_a_prompt_is_handed_over_to_all_ranks(split: Cluster) -> None:
    assert "Berlin" in ask(split)
    [worker] = split.workers("decode")
    assert split.metric(worker.http_address, "pdserve_worker_info", tensor_parallel_size=str(RANKS)) == 1
    assert split.worker_metric("decode", "pdserve_kv_transfers_total", outcome="committed") > 0
    split.wait_idle()


def test_a_lost_rank_takes_the_worker_with_it_which_is_started_again(split: Cluster) -> None:
    [before] = split.workers("decode")
    everyone = [split.processes()["decode-0"], *followers(split)]
    assert len(everyone) == RANKS
    everyone[1].kill()
    split.until(lambda: not any(map(is_alive, everyone)), "no rank outlives another")
    split.until(
        # The router may still know the old one.
        lambda: [worker for worker in split.workers("decode") if worker.http_address != before.http_address],
        "started again",
        timeout_s=60,
    )
    assert "Berlin" in ask(split)
    split.wait_idle()


def test_ranks_end_with_the_first_of_them(split: Cluster) -> None:
    everyone = [split.processes()["decode-0"], *followers(split)]
    everyone[0].kill()
    split.until(lambda: not any(map(is_alive, everyone)), "no rank outlives another")


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
