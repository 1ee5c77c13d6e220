"""`pdserve bench serve` against a real cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.cli.__main__ import main
from tests.support.cluster import Cluster


def _bench(cluster: Cluster, tmp_path: Path, *flags: str) -> Any:
    where = ("--base-url", cluster.base_url, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r")
    assert main(["bench", "serve", *where, "--save-detailed", *flags]) == 0
    return json.loads((tmp_path / "r").read_text())


def test_lengths_are_exact_and_greedy_answers_are_the_same_alone_and_in_a_crowd(
    cluster: Cluster, tmp_path: Path
) -> None:
    lens = ("--num-prompts", "6", "--random-input-len", "80", "--random-output-len", "8", "--ignore-eos")
    crowd = _bench(cluster, tmp_path, *lens, "--num-warmups", "1")
    alone = _bench(cluster, tmp_path, *lens, "--max-concurrency", "1")
    for result in (crowd, alone):
        assert (result["completed"], result["failed"]) == (6, 0)
        assert result["input_lens"] == [80] * 6
        assert result["output_lens"] == [8] * 6
        # Equal when a busy client reads all of an answer's events at once.
        assert all(0 < ttft <= e2el for ttft, e2el in zip(result["ttfts"], result["e2els"], strict=True))
    assert crowd["generated_texts"] == alone["generated_texts"]
    assert crowd["max_concurrent_requests"] > alone["max_concurrent_requests"] == 1


def test_shared_prefixes_are_found_in_the_cache(cluster: Cluster, tmp_path: Path) -> None:
    def hits() -> float:
        return sum(cluster.worker_metric(tier, "pdserve_prefix_cache_hits_total") for tier in ("prefill", "decode"))

    before = hits()
    lens = ("--prefix-repetition-prefix-len", "128", "--prefix-repetition-suffix-len", "16")
    counts = ("--prefix-repetition-num-prefixes", "1", "--prefix-repetition-output-len", "2", "--num-prompts", "4")
    result = _bench(cluster, tmp_path, "--dataset-name", "shared-prefix", *lens, *counts, "--max-concurrency", "1")
    assert result["completed"] == 4
    assert hits() - before >= 128 * 3


def test_a_chat_is_measured_too(cluster: Cluster, tmp_path: Path) -> None:
    chat = ("--endpoint", "/v1/chat/completions", "--random-input-len", "20", "--random-output-len", "4")
    result = _bench(cluster, tmp_path, *chat, "--num-prompts", "2", "--ignore-eos", "--request-rate", "20")
    assert result["completed"] == 2
    assert result["output_lens"] == [4, 4]
    # A busy worker sends the tokens of several steps together, and a busy client reads events at once: pauses of 0.
    assert all(1 <= len(pauses) <= 3 for pauses in result["itls"])
    assert result["mean_itl_ms"] >= 0
