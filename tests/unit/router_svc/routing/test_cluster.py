"""What routers look for in the prefix index: the blocks that each worker has computed by its own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from pdserve.base.block_hash import hash_blocks, hash_key
from pdserve.base.ids import BlockHash, WorkerId
from router_svc.routing.cluster import Cluster, PrefixHashes
from tests.support.records import LAYOUT, worker_record

PROMPT = list(range(4 * LAYOUT.block_size))


def _published(numerics_class: str) -> list[BlockHash]:
    key = hash_key(model=LAYOUT.model, dtype=LAYOUT.dtype, block_size=LAYOUT.block_size, numerics_class=numerics_class)
    return hash_blocks(key, PROMPT, LAYOUT.block_size)


async def test_a_prompt_is_looked_up_by_the_numerics_class_of_each_worker() -> None:
    """Blocks of the class of an older worker, which is empty, are found as before."""
    classes = {WorkerId("a"): "avx512", WorkerId("b"): "avx2", WorkerId("c"): "", WorkerId("d"): "avx2"}
    ready = [replace(worker_record(name), numerics_class=numerics) for name, numerics in classes.items()]
    held = {name: set(_published(classes[name])[:count]) for name, count in zip(classes, (1, 2, 3), strict=False)}
    # Blocks of another class are none that this worker would use.
    held[WorkerId("d")] = set(_published("avx512"))

    def index(hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        counts = {name: sum(each in blocks for each in hashes) for name, blocks in held.items()}
        return {name: count for name, count in counts.items() if count}

    workers = SimpleNamespace(workers_of=lambda tier: ready if tier == "decode" else [])
    cluster = Cluster(
        policy=cast(Any, SimpleNamespace(model_name=ready[0].model)), directory=cast(Any, workers), index=index
    )
    assert await cluster.overlap(PrefixHashes(PROMPT, b"")) == {"a": 1, "b": 2, "c": 3}
