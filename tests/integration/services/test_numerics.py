"""Blocks that another numerics class has computed serve the request that they were sent for, and no other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.choice import instruction_sets
from tests.integration.services.local_cluster import LocalCluster, running_cluster
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]

needs_two = pytest.mark.skipif(len(instruction_sets()) < 2, reason="this machine runs fewer than two instruction sets")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


async def _cached_after_handover(cluster: LocalCluster) -> int:
    """Tokens that the decode worker has of a prompt after it came from the prefill worker."""
    request = cluster.request(PROMPT)
    await request.start()
    await request.prefill(await request.ticket())
    assert len((await request.finish())[0]) == request.params.max_tokens
    again = cluster.request(PROMPT)
    await again.start()
    event = await again.event()
    again.cancel()
    await cluster.all_free()
    return event.ticket.cached_tokens


@needs_two
async def test_blocks_of_another_class_are_no_prefix_of_later_requests(model: Path) -> None:
    kinds = instruction_sets()
    settings = {"prefill": {"instruction_set": kinds[-1]}, "decode": {"instruction_set": kinds[0]}}
    async with running_cluster(model, **settings) as cluster:
        assert cluster.prefill.numerics_class != cluster.decode.numerics_class
        assert await _cached_after_handover(cluster) == 0
        # Those that it computes by itself are.
        await cluster.local(PROMPT)
        assert await _cached_after_handover(cluster) == 44


async def test_blocks_of_the_same_class_are(model: Path) -> None:
    async with running_cluster(model) as cluster:
        assert cluster.prefill.numerics_class == cluster.decode.numerics_class
        assert await _cached_after_handover(cluster) == 44
