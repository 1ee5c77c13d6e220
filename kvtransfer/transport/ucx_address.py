"""The data address of the UCX transport: where the process runs, and its UCX worker's own address."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pdserve.base.errors import PeerLost

_MAGIC = b"pdux1"
_ID_BYTES = 16
_CHECK_BYTES = 8
_MAX_BYTES = 1 << 16


def _host_id() -> bytes:
    """Equal in processes that can share memory: the same boot of a kernel, and the same ipc and pid namespaces."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_bytes()]
    parts += [str(Path(f"/proc/self/ns/{name}").readlink()).encode() for name in ("ipc", "pid")]
    return hashlib.blake2b(b"\0".join(parts), digest_size=_ID_BYTES).digest()


HOST_ID = _host_id()


def pack_address(worker_address: bytes) -> bytes:
    """Magic, host id, UCX address, checksum: UCX itself trusts what it is given, down to a crash."""
    body = _MAGIC + HOST_ID + worker_address
    return body + _check(body)


def unpack_address(address: bytes) -> tuple[bytes, bytes]:
    """Host id and UCX address.

    Raises: PeerLost when it is not one of ours.
    """
    body, check = address[:-_CHECK_BYTES], address[-_CHECK_BYTES:]
    fits = len(_MAGIC) + _ID_BYTES < len(body) < _MAX_BYTES
    if not fits or not body.startswith(_MAGIC) or check != _check(body):
        raise PeerLost(f"the data address ({len(address)} bytes) is not one of the ucx transport")
    rest = body[len(_MAGIC) :]
    return rest[:_ID_BYTES], rest[_ID_BYTES:]


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES, person=b"pdserve.ucx").digest()
