"""Workers with several ranks, each a process with some of the heads, give the tokens of workers with one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.handover.staging import StagedMemory
from tests.integration.services.local_cluster import LocalCluster, running_cluster
from tests.support import depth
from tests.unit.model.tiny import save_model, with_scales

PROMPTS = [
    [(7 * position + 11 * index) % 90 + 3 for position in range(length)] for index, length in enumerate((45, 3, 16, 29))
]
#: Choices that share a last block and diverge there; sampling depends on more than the largest logit.
SAMPLED: dict[str, Any] = {"n": 3, "temperature": 0.9, "top_p": 0.95, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four KV heads and a vocabulary that no number of ranks divides evenly."""
    changes: dict[str, object] = {"num_key_value_heads": 4, "num_attention_heads": 8, "vocab_size": 101}
    return save_model(tmp_path_factory.mktemp("ranks"), changes)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[int, list[int]]]:
    async def of_one_rank() -> list[dict[int, list[int]]]:
        async with running_cluster(model, prefill=ranks(1), decode=ranks(1)) as cluster:
            return await answers(cluster)

    return asyncio.run(of_one_rank())


def ranks(size: int) -> dict[str, Any]:
    return {"tensor_parallel_size": size, "kernels": "reference", "staging_memory": 1 << 16}


async def answers(cluster: LocalCluster) -> list[dict[int, list[int]]]:
    """Tokens of every prompt, greedy and sampled, first handed over and then prefilled by the decode worker."""
    tokens = []
    for prompt in PROMPTS:
        for params in ({}, SAMPLED):
            request = cluster.request(prompt, **params)
            await request.start()
            await request.prefill(await request.ticket())
            tokens.append(await request.finish())
            tokens.append(await cluster.local(prompt, **params))
    return tokens


@pytest.mark.parametrize(
    ("prefill", "decode", "layer_groups"), [(2, 1, 1), (1, 2, 2), *([(2, 4, 2)] if depth.IS_FULL else [])]
)
async def test_tokens_are_those_of_one_rank(
    model: Path, expected: list[dict[int, list[int]]], prefill: int, decode: int, layer_groups: int
) -> None:
    receiving = ranks(decode) | {"layer_groups": layer_groups}
    async with running_cluster(model, prefill=ranks(prefill), decode=receiving) as cluster:
        assert await answers(cluster) == expected
        await cluster.all_free()
        for worker in (cluster.prefill, cluster.decode):
            if isinstance(worker.blocks, StagedMemory):
                assert worker.blocks.num_free == worker.blocks.max_blocks


async def test_each_rank_has_the_scales_of_its_heads(tmp_path: Path) -> None:
    # The scales differ so much that with its neighbour's, a head's values would saturate or vanish.
    scales = {f"{layer}.{side}_scale": torch.tensor([0.002, 0.2]) for layer in range(2) for side in "kv"}
    model = with_scales(tmp_path, scales)
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    async with running_cluster(model, prefill=ranks(1) | fp8, decode=ranks(1) | fp8) as cluster:
        expected = await answers(cluster)
    async with running_cluster(model, prefill=ranks(1) | fp8, decode=ranks(2) | fp8) as cluster:
        assert await answers(cluster) == expected
