"""The data address of the UCX transport: its UCX worker's own address in a checked frame."""

from __future__ import annotations

import hashlib

from pdserve.base.errors import PeerLost

_MAGIC = b"pdux1"
_CHECK_BYTES = 8
_MAX_BYTES = 1 << 16


def pack_address(worker_address: bytes) -> bytes:
    """Frames a UCX address with a magic and a checksum: UCX trusts any address, and a wrong one crashes it."""
    body = _MAGIC + worker_address
    return body + _check(body)


def unpack_address(address: bytes) -> bytes:
    """The UCX address.

    Raises: PeerLost when it is not one of ours.
    """
    body, check = address[:-_CHECK_BYTES], address[-_CHECK_BYTES:]
    fits = len(_MAGIC) < len(body) < _MAX_BYTES
    if not fits or not body.startswith(_MAGIC) or check != _check(body):
        raise PeerLost(f"The data address ({len(address)} bytes) is not one of the ucx transport.")
    return body[len(_MAGIC) :]


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES, person=b"pdserve.ucx").digest()
