"""The cluster secret, which the routers and workers of one cluster share: where it is read, and MACs with it."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.base.config import variable
from pdserve.base.errors import SetupError

#: The variable that holds the secret where no file does.
SECRET_VARIABLE = "PDSERVE_CLUSTER_SECRET"
#: This word in place of a secret accepts messages without a MAC. As the first word, it also means that none are made.
OPEN = "open"
MIN_CHARACTERS, MAX_CHARACTERS = 16, 1024
MAX_SECRETS = 8
MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """One or several secrets: the first makes MACs, and all are accepted, so that a secret can be replaced."""

    keys: tuple[bytes, ...] = field(repr=False)
    #: Whether messages get a MAC. False only on the way from an open cluster to one with a secret.
    signs: bool = True
    #: Whether messages without a MAC are accepted.
    accepts_open: bool = False

    def mac(self, purpose: str, *fields: bytes) -> bytes:
        """The MAC of these fields for one purpose, 32 bytes. A MAC for one purpose is worthless for another."""
        return _mac(self.keys[0], purpose, fields)

    def matches(self, mac: bytes, purpose: str, *fields: bytes) -> bool:
        """Whether one of the secrets made this MAC. Takes the same time wherever the MAC differs."""
        return any(hmac.compare_digest(mac, _mac(key, purpose, fields)) for key in self.keys)

    def derived(self, purpose: str) -> tuple[bytes, ...]:
        """A key of 32 bytes for one purpose from each of the secrets, that of the first one first."""
        return tuple(_mac(key, purpose, ()) for key in self.keys)


def new_secret() -> str:
    """A random secret, 43 characters."""
    return secrets.token_urlsafe(32)


def read_secret(file: str | None) -> ClusterSecret | None:
    """The secret in `file`, else that of the environment; None: the cluster is open. Raises: SetupError."""
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"Cannot read the cluster secret {file}: {error}. Check --cluster-secret-file.") from error
        return parse_secret(text, where=f"--cluster-secret-file {file}")
    text = variable(SECRET_VARIABLE) or ""
    return parse_secret(text, where=SECRET_VARIABLE) if text else None


def parse_secret(text: str, *, where: str) -> ClusterSecret:
    """The one or several secrets of a text, separated by white space. Raises: SetupError, which shows none of them."""
    words = text.split()
    keys = tuple(word.encode() for word in words if word != OPEN)
    if not keys:
        raise SetupError(f"{where} has no secret. Write one of at least {MIN_CHARACTERS} random characters.")
    if len(words) > MAX_SECRETS:
        raise SetupError(f"{where} has {len(words)} secrets, and {MAX_SECRETS} is the limit. Remove old ones.")
    for key in keys:
        if not MIN_CHARACTERS <= len(key) <= MAX_CHARACTERS:
            raise SetupError(
                f"{where} has a secret of {len(key)} characters; {MIN_CHARACTERS} to {MAX_CHARACTERS} are allowed. "
                "Take random ones, such as those of `openssl rand -hex 32`."
            )
    return ClusterSecret(keys, signs=words[0] != OPEN, accepts_open=OPEN in words)


def _mac(key: bytes, purpose: str, fields: Iterable[bytes]) -> bytes:
    framed = (len(field).to_bytes(8, "little") + field for field in (purpose.encode(), *fields))
    return hmac.digest(key, b"".join(framed), "sha256")
