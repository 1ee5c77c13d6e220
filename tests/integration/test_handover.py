"""KV sent between the tiers: each missing block once, and none where recomputing is cheaper."""

from __future__ import annotations

from typing import Any

from tests.support.cluster import MODEL, Cluster

BLOCK_SIZE = 16


def _complete(cluster: Cluster, prompt: Any, max_tokens: int = 6) -> Any:
    return cluster.client().completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0)


def _received_blocks(cluster: Cluster) -> float:
    return cluster.worker_metric("decode", "pdserve_kv_transfer_blocks_total", direction="received")


def _prompt(first: int, length: int) -> list[int]:
    """Token ids that no other test uses."""
    return [first, *((first * 31 + 7 * index) % 40_000 + 100 for index in range(1, length))]


def test_every_block_of_a_new_prompt_is_sent_once(cluster: Cluster) -> None:
    before = _received_blocks(cluster)
    _complete(cluster, _prompt(1001, 250))
    assert _received_blocks(cluster) - before == -(-250 // BLOCK_SIZE)
    # Both workers run on this host: no byte went through a socket.
    assert cluster.worker_metric("prefill", "pdserve_transport_path_info", expected="local", actual="local") == 1


def test_blocks_cached_by_the_decode_worker_are_not_sent_again(cluster: Cluster) -> None:
    prompt = _prompt(1002, 256)
    _complete(cluster, prompt)
    cluster.wait_idle()
    before = _received_blocks(cluster)
    longer = [*prompt, *_prompt(1003, 160)]
    _complete(cluster, longer)
    # The tokens generated for the first request do not fill a block that the second could use.
    assert _received_blocks(cluster) - before == 160 // BLOCK_SIZE


def test_a_short_uncached_remainder_is_prefilled_by_the_decode_worker(cluster: Cluster) -> None:
    prompt = _prompt(1004, 256)
    _complete(cluster, prompt)
    cluster.wait_idle()
    before = _received_blocks(cluster), cluster.worker_metric("prefill", "pdserve_prompt_tokens_total")
    response = _complete(cluster, [*prompt, *_prompt(1005, 20)])
    after = _received_blocks(cluster), cluster.worker_metric("prefill", "pdserve_prompt_tokens_total")
    assert after == before
    assert response.usage.prompt_tokens_details.cached_tokens == 256


def test_a_cluster_without_prefill_workers_answers_without_transfers(monolith: Cluster) -> None:
    assert _complete(monolith, _prompt(1006, 300)).usage.completion_tokens == 6
    assert _received_blocks(monolith) == 0
