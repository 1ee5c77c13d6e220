"""Signatures of thinking: what this cluster has thought can be known from other text."""

from __future__ import annotations

import base64
import hashlib

from pdserve.peers.secret import ClusterSecret

_PURPOSE = "thinking"
_PERSON = b"pdserve-thinking"


class Signer:
    """Signs thinking with the cluster secret. Without one, a signature is a digest, which anybody can make."""

    def __init__(self, secret: ClusterSecret | None) -> None:
        self._key = b"" if secret is None else secret.derived(_PURPOSE)[0]

    def start(self) -> Signature:
        """The signature of a text that comes piece by piece."""
        return Signature(self._key)


class Signature:
    """The signature of one block of thinking. Equal for any split of the text, and on any router of the cluster."""

    def __init__(self, key: bytes) -> None:
        self._digest = hashlib.blake2b(key=key, digest_size=32, person=_PERSON)

    def add(self, text: str) -> None:
        """Takes more of the text."""
        self._digest.update(text.encode(errors="surrogatepass"))

    def text(self) -> str:
        """The signature of what was added."""
        return base64.b64encode(self._digest.digest()).decode()
