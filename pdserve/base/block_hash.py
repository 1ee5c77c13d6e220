"""Chained hashes of full blocks, equal on every worker and after restarts.

Equal hashes mean equal tokens from the start, computed by one numerics class: so equal bits.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from pdserve.base.ids import BlockHash

HASH_BYTES, HASH_KEY_BYTES = 16, 32
_SCHEMA = b"pdserve.block.v1"


def hash_key(*, model: str, dtype: str, block_size: int, salt: bytes = b"", numerics_class: str = "") -> bytes:
    """The 32-byte key of all hashes of one model, layout, tenant and numerics class.

    Without the salt, hashes cannot be guessed. Workers that publish no class hash without one.
    """
    digest = hashlib.blake2b(_SCHEMA, digest_size=HASH_KEY_BYTES)
    values = (model.encode(), dtype.encode(), block_size.to_bytes(4, "little"), salt, numerics_class.encode())
    for value in values if numerics_class else values[:-1]:
        digest.update(len(value).to_bytes(4, "little"))
        digest.update(value)
    return digest.digest()


def hash_blocks(key: bytes, tokens: Sequence[int], block_size: int, known: Sequence[BlockHash] = ()) -> list[BlockHash]:
    """Hashes of all full blocks of `tokens`. `known`: the hashes of the first blocks, if already computed.

    A block's hash is blake2b(parent hash || tokens as little-endian u32, key), 16 bytes. The first parent is zero.
    """
    hashes = list(known)
    parent: bytes = hashes[-1] if hashes else bytes(HASH_BYTES)
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        body = array("I", tokens[start : start + block_size]).tobytes()
        parent = hashlib.blake2b(parent + body, key=key, digest_size=HASH_BYTES).digest()
        hashes.append(BlockHash(parent))
    return hashes
