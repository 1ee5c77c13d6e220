"""A cluster of processes on GPUs: blocks go from cache to cache, or through host memory, also behind a kill."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support import depth
from tests.support.cluster import Cluster, running_cluster
from tests.support.devices import HAS_GPU, SIMULATED
from tests.support.tiny_model import VOCAB_SIZE, write_model
from tests.unit.model.tiny import save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no GPU"),
    pytest.mark.skipif(SIMULATED and not depth.IS_FULL, reason="takes a minute there"),
]

FLAGS = (
    "--device=cuda:0",
    "--prefill=1",
    "--decode=1",
    "--max-num-batched-tokens=16",
    "--max-num-seqs=4",
    f"--kv-cache-memory={1 << 22}",
    f"--staging-memory={1 << 22}",
    "--gpu-memory-utilization=0.4",
    "--local-prefill-threshold=0",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without measurements of earlier runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pdserve" / "activations"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with weights and a tokenizer of bytes."""
    directory, router = tmp_path_factory.mktemp("model"), write_model(tmp_path_factory.mktemp("router") / "model")
    changes: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB_SIZE,
    }
    save_model(directory, changes, torch.bfloat16)
    for path in router.iterdir():
        if path.name != "config.json":
            shutil.copy(path, directory)
    return str(directory)


def answer(cluster: Cluster, model: str) -> str:
    with cluster.client() as client:
        name = Path(model).name
        return str(client.completions.create(model=name, prompt="hello", max_tokens=3, temperature=0).choices[0].text)


def first_stack(pid: int) -> str:
    """Address of the stack with which the program was executed: random, and inherited by a forked process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[25]


def paths(cluster: Cluster) -> dict[str, int]:
    """Paths of the prefill worker's blocks, and the number of its peers on each."""
    [prefill] = cluster.workers("prefill")
    return prefill.transport.paths


@pytest.mark.parametrize(
    "path",
    [
        "local",
        pytest.param("local_staged", marks=pytest.mark.skipif(not SIMULATED, reason="needs GPUs that are apart")),
    ],
)
def test_blocks_are_handed_over_within_the_host_also_behind_a_kill_of_either_worker(
    tmp_path: Path, model: str, path: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "local_staged":
        monkeypatch.setenv("PDSERVE_TEST_GPU_OF_ITS_OWN", "1")
    with running_cluster(tmp_path, *FLAGS, model=model) as cluster:
        expected = answer(cluster, model)
        cluster.until(lambda: paths(cluster) == {path: 1}, "the path is known")
        for name in ("decode-0", "prefill-0"):
            [before] = cluster.workers(name.partition("-")[0])
            cluster.kill(name)
            cluster.until(
                lambda name=name, before=before: [  # type: ignore[misc]
                    worker for worker in cluster.workers(name.partition("-")[0]) if worker.epoch != before.epoch
                ],
                f"{name} is back",
            )
            assert answer(cluster, model) == expected
            cluster.until(lambda: paths(cluster) == {path: 1}, "the path is known again")
        workers = [cluster.processes()[name].pid for name in ("decode-0", "prefill-0")]
        assert len(set(map(first_stack, workers))) == 1, "they were not forked by the same process"
        logs = "".join(path.read_text() for path in cluster.log_dir.glob("*-0.log"))
    # Both tiers measure what their steps need, and the workers behind them take it over.
    assert (logs.count("measured=now"), logs.count("measured=before")) == (2, 2)
    assert len(list(cache.iterdir())) == 2
