"""Digests of blocks and the MAC of a commit: wrong or forged bytes never become tokens."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import xxhash

from kvtransfer.transport.base import Buffer
from pdserve.base.ids import Epoch, RequestId, TransferId

DIGEST_BYTES = 16
#: Of messages in host memory: `MessageDigest`. Of those in a GPU's: `kernels.triton.blocks`, of each block.
HOST_DIGEST, DEVICE_DIGEST = "xxh3", "nh"
DIGESTS = (HOST_DIGEST, DEVICE_DIGEST)
MAC_BYTES = 32


class MessageDigest:
    """xxh3-128 of a message, seeded by the ticket's key: at memory speed, and of no use in another transfer."""

    __slots__ = ("_key", "_seed")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seed = int.from_bytes(
            hashlib.blake2b(key=key, digest_size=8, person=b"pdserve.digest").digest(), "little"
        )

    def __call__(self, message: Buffer) -> bytes:
        """16 bytes. The GIL is released for large messages."""
        return xxhash.xxh3_128_digest(message.data, self._seed)

    @property
    def device_key(self) -> bytes:
        """16 bytes for digests of blocks that a GPU computes."""
        return hashlib.blake2b(key=self._key, digest_size=16, person=b"pdserve.device").digest()

    def of_blocks(self, digests: bytes) -> bytes:
        """Of a message whose blocks have these digests, one after the other."""
        return xxhash.xxh3_128_digest(digests, self._seed)


def commit_mac(
    key: bytes,
    *,
    transfer_id: TransferId,
    request_id: RequestId,
    attempt: int,
    epoch: Epoch,
    digests: Sequence[bytes],
    first_tokens: Sequence[int],
) -> bytes:
    """blake2b keyed with the ticket's key over every field of a commit, each with its length (32 bytes)."""
    mac = hashlib.blake2b(key=key, digest_size=MAC_BYTES, person=b"pdserve.commit")
    tokens = b"".join(token.to_bytes(4, "little") for token in first_tokens)
    numbers = attempt.to_bytes(4, "little") + epoch.to_bytes(8, "little")
    for part in (transfer_id, request_id.encode(), numbers, b"".join(digests), tokens):
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


def same_mac(one: bytes, other: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(one, other)
