"""Encrypts what routers keep of streams in Redis, which are prompts and answers, with the cluster secret.

AES-256-GCM with a key that follows from the secret; the stream and the position of a piece are authenticated with it,
so that pieces can neither be read nor changed, swapped or taken from another stream. Without a secret they are plain.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pdserve.base.errors import Unreadable
from pdserve.peers.secret import ClusterSecret

_PURPOSE = "stream_log"
_PLAIN, _SEALED = b"\x00", b"\x01"
_NONCE_BYTES = 12


class StreamSeal:
    """Seals and opens pieces of streams."""

    def __init__(self, secret: ClusterSecret | None) -> None:
        keys = () if secret is None else secret.derived(_PURPOSE)
        self._ciphers = tuple(map(AESGCM, keys))
        self._seals = secret is not None and secret.signs
        self._accepts_plain = secret is None or secret.accepts_open

    def seal(self, piece: bytes, stream: str, index: int) -> bytes:
        """What to store. `index`: the piece's position in the stream, from 0."""
        if not self._seals:
            return _PLAIN + piece
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _SEALED + nonce + self._ciphers[0].encrypt(nonce, piece, _where(stream, index))

    def open(self, stored: bytes, stream: str, index: int) -> bytes:
        """The piece. Raises `Unreadable` for one that no router of this cluster has stored there."""
        kind, rest = stored[:1], stored[1:]
        if kind == _PLAIN and self._accepts_plain:
            return rest
        for cipher in self._ciphers if kind == _SEALED else ():
            try:
                return cipher.decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], _where(stream, index))
            except (InvalidTag, ValueError):
                continue
        raise Unreadable(
            "The stream in Redis is not from this cluster. Start every router with the same --cluster-secret-file."
        )


def _where(stream: str, index: int) -> bytes:
    return f"{stream}/{index}".encode()
