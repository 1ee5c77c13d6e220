"""Workers on a real GPU that hand over, run ahead and split models give the tokens of a single worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.handover import DEVICE as IN_GPU_MEMORY
from benchmarks.gpu.handover import HOST, LOCAL, PINNED, Case, measure
from pdserve.base.layout import KvLayout
from tests.integration.services.local_cluster import LocalCluster, running_cluster
from tests.support import depth
from tests.support.devices import HAS_GPU, SIMULATED, gpu_only, two_gpus
from tests.unit.model.tiny import save_model

#: A step on a simulated GPU takes a second.
LENGTHS, NUM_CHOICES, NUM_TOKENS = ((10, 3), 2, 3) if SIMULATED else ((45, 3, 16), 3, 24)
PROMPTS = [[(7 * position + length) % 90 + 3 for position in range(length)] for length in LENGTHS]
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS}
SAMPLED: dict[str, Any] = {"n": NUM_CHOICES, "temperature": 0.9, "top_p": 0.95, "max_tokens": NUM_TOKENS}
#: Both workers of a cluster share one GPU.
ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "gpu_memory_utilization": 0.4,
    "kv_cache_memory": 1 << 22,
    "staging_memory": 1 << 22,
}
if SIMULATED:
    ON_GPU["max_num_batched_tokens"] = 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache without measurements of earlier runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32 elements, as the kernels' matrix products need; on a real GPU, four of them for K and V."""
    heads = 2 if SIMULATED else 8
    changes: dict[str, object] = {
        "hidden_size": 32 * heads,
        "intermediate_size": 64 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
    }
    return save_model(tmp_path_factory.mktemp("gpu"), changes, torch.bfloat16)


async def _answers(cluster: LocalCluster) -> list[dict[int, list[int]]]:
    """All requests at once, each handed over: sequences join and leave the batch."""

    async def answer(prompt: list[int], params: dict[str, Any]) -> dict[int, list[int]]:
        request = cluster.request(prompt, **params)
        await request.start()
        await request.prefill(await request.ticket())
        return await request.finish()

    return list(await asyncio.gather(*(answer(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED))))


async def _alone(cluster: LocalCluster) -> list[dict[int, list[int]]]:
    """One request after the other, each prefilled by the decode worker."""
    return [await cluster.local(prompt, **params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize(
    ("layer_groups", "eager"),
    # A simulated GPU takes half a minute for each; only the full depth runs more than one on it.
    [(2, False)] if SIMULATED and not depth.IS_FULL else [(1, True), (2, False), (1, False), (2, True)],
)
async def test_requests_handed_over_in_a_crowd_give_the_tokens_that_each_gives_alone(
    model: Path, layer_groups: int, eager: bool
) -> None:
    common = ON_GPU | {"enforce_eager": eager}
    # A simulated GPU on a busy machine takes seconds for a step, in which no lease may end.
    decode = common | {"layer_groups": layer_groups, "max_num_seqs": 8, "lease_s": 120.0}
    async with running_cluster(model, prefill=common, decode=decode) as cluster:
        assert await _answers(cluster) == await _alone(cluster)
        await cluster.all_free()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
async def test_two_ranks_over_nccl_give_the_same_tokens_alone_and_in_a_crowd(model: Path) -> None:
    split = ON_GPU | {"tensor_parallel_size": 2}
    async with running_cluster(model, prefill=split, decode=split) as cluster:
        assert await _answers(cluster) == await _alone(cluster)
        await cluster.all_free()


SIZES = (
    {"num_layers": 2, "block_size": 4, "head_dim": 16}
    if SIMULATED
    else {"num_layers": 4, "block_size": 16, "head_dim": 64}
)
LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", num_kv_heads=2, **SIZES)


@pytest.mark.parametrize(
    ("device", "memory", "between"),
    [
        pytest.param("cpu", HOST, {}, marks=pytest.mark.skipif(SIMULATED, reason="no GPU is needed")),
        pytest.param(
            "cuda",
            HOST,
            {},
            marks=[*gpu_only, pytest.mark.skipif(SIMULATED and not depth.IS_FULL, reason="takes ten seconds there")],
        ),
        pytest.param(
            "cuda",
            IN_GPU_MEMORY,
            {},
            marks=[*gpu_only, pytest.mark.skipif(SIMULATED and not depth.IS_FULL, reason="takes 30 s there")],
        ),
        pytest.param("cuda", LOCAL, {}, marks=gpu_only),
        pytest.param("cuda", PINNED, {}, marks=gpu_only),
        pytest.param("cuda:0", LOCAL, {"peer_device": "cuda:1"}, marks=two_gpus),
        pytest.param("cuda:0", PINNED, {"peer_device": "cuda:1"}, marks=two_gpus),
        pytest.param("cuda:0", IN_GPU_MEMORY, {"transport": "nccl", "peer_device": "cuda:1"}, marks=two_gpus),
    ],
)
def test_two_processes_hand_over_and_verify(device: str, memory: str, between: dict[str, str]) -> None:
    # The last bundle is cut short.
    times = measure(
        Case(layout=LAYOUT, num_blocks=20 if SIMULATED else 40, rounds=2, device=device, memory=memory, **between)
    )
    assert len(times.whole_ms) == len(times.exposed_ms) == 2
