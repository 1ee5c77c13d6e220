"""Worker records and block hashes for tests."""

from __future__ import annotations

import hashlib

from pdserve.base.ids import BlockHash, Epoch, RouterId, WorkerId
from pdserve.base.layout import KvLayout
from pdserve.peers.workers import Tier, WorkerLoad, WorkerRecord

LAYOUT = KvLayout.uniform(model="fingerprint", dtype="float32", block_size=16, num_layers=2, num_kv_heads=1, head_dim=8)

#: Id of the router under test.
ME = RouterId("me")


def worker_record(
    worker_id: str = "decode-0",
    *,
    epoch: int = 1,
    tier: Tier = "decode",
    ready: bool = True,
    free_blocks: int = 100,
) -> WorkerRecord:
    """A valid record of a worker."""
    return WorkerRecord(
        worker_id=WorkerId(worker_id),
        epoch=Epoch(epoch),
        tier=tier,
        grpc_address="127.0.0.1:7001",
        http_address="127.0.0.1:7002",
        stream_address="127.0.0.1:7003",
        model="tiny",
        layout=LAYOUT,
        max_num_seqs=8,
        max_model_len=256,
        total_blocks=100,
        pid=4242,
        ready=ready,
        load=WorkerLoad(free_blocks=free_blocks),
    )


def block_hash(number: int) -> BlockHash:
    """A hash that is unique to this number."""
    return BlockHash(hashlib.blake2b(str(number).encode(), digest_size=16).digest())


def block_hashes(count: int, *, start: int = 0) -> list[BlockHash]:
    """The hashes of `count` numbers from `start` on."""
    return [block_hash(number) for number in range(start, start + count)]
