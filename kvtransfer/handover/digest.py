"""Digests of blocks and the MAC of a commit: wrong or forged bytes never become tokens."""

from __future__ import annotations

import hashlib
import hmac

import xxhash

from kvtransfer.transport.base import Buffer

DIGEST_BYTES = 16
#: Kinds of digests: `MessageDigest` over messages in host memory, `kernels.triton.blocks` over each block on a GPU.
HOST_DIGEST, DEVICE_DIGEST = "xxh3", "nh"
DIGESTS = (HOST_DIGEST, DEVICE_DIGEST)
MAC_BYTES = 32


class MessageDigest:
    """xxh3-128 of messages, seeded by the ticket's key: runs at memory speed and is useless in another transfer."""

    __slots__ = ("_key", "seed")

    def __init__(self, key: bytes) -> None:
        self._key = key
        #: That of xxh3, 64 bits.
        self.seed = int.from_bytes(hashlib.blake2b(key=key, digest_size=8, person=b"pdserve.digest").digest(), "little")

    def __call__(self, message: Buffer) -> bytes:
        """Digest of a message, 16 bytes. Releases the GIL for large messages."""
        return xxhash.xxh3_128_digest(message.data, self.seed)

    @property
    def device_key(self) -> bytes:
        """Key of the block digests that a GPU computes, 16 bytes."""
        return hashlib.blake2b(key=self._key, digest_size=16, person=b"pdserve.device").digest()

    def of_blocks(self, digests: bytes) -> bytes:
        """Digest of a message whose blocks have these digests, concatenated."""
        return xxhash.xxh3_128_digest(digests, self.seed)


def commit_mac(key: bytes, *fields: bytes) -> bytes:
    """blake2b keyed with the ticket's key over all fields of a commit, each preceded by its length (32 bytes)."""
    mac = hashlib.blake2b(key=key, digest_size=MAC_BYTES, person=b"pdserve.commit")
    for field in fields:
        mac.update(len(field).to_bytes(8, "little"))
        mac.update(field)
    return mac.digest()


def same_mac(one: bytes, other: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(one, other)
