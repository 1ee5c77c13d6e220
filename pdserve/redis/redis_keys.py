"""What the names of our keys in Redis begin with."""

from __future__ import annotations

import re

DEFAULT_PREFIX = "pd"
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}|\{[A-Za-z0-9._:-]{1,62}\}")


def parse_prefix(text: str) -> str:
    """A prefix of keys. Raises ValueError."""
    if not _PREFIX.fullmatch(text):
        raise ValueError(f"{text!r} is not a prefix of keys; use up to 64 letters, digits and the characters . _ : -")
    return text


def key_prefix(url: str, prefix: str) -> str:
    """What keys begin with. In a cluster it is a hash tag, which keeps them on one node."""
    return f"{{{prefix}}}" if "+cluster://" in url and not prefix.startswith("{") else prefix
