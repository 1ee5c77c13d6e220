"""The cost of a lookup: a router does one for every request, on the event loop that also streams tokens."""

from __future__ import annotations

from kvtransfer.index.prefix_index import KvEvent, KvEventKind, PrefixIndex
from pdserve.base.ids import BlockHash, Epoch, WorkerId
from tests.support.records import block_hashes


class CountedHash(bytes):
    """A block hash that counts its lookups in tables."""

    num_lookups = 0

    def __hash__(self) -> int:
        CountedHash.num_lookups += 1
        return super().__hash__()


def test_a_lookup_reads_one_table_once_per_block_for_any_number_of_workers() -> None:
    prompt = block_hashes(500)
    index = PrefixIndex()
    for number in range(16):
        held = tuple(prompt[: 500 - 20 * number])
        index.apply(KvEvent(worker_id=WorkerId(f"w{number}"), epoch=Epoch(1), kind=KvEventKind.RESET, added=held))
    CountedHash.num_lookups = 0
    overlap = index.overlap([BlockHash(CountedHash(block_hash)) for block_hash in prompt])
    assert overlap == {f"w{number}": 500 - 20 * number for number in range(16)}
    assert CountedHash.num_lookups == 501  # The first block's twice.
