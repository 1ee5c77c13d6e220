"""A TLS context for a listener that outlives its files: each new connection uses the present context.

A context that is loaded again still trusts every CA that it has ever loaded, and resumes sessions of their clients.
So a change of files needs a new context, but asyncio's servers keep the object that they were opened with.
"""

from __future__ import annotations

import ssl
from typing import Any


class ReplacedContext(ssl.SSLContext):
    """Delegates each handshake to `current`. It has no certificate: a handshake that bypasses `current` fails."""

    def __new__(cls, current: ssl.SSLContext) -> ReplacedContext:
        """`current`: the context to begin with."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, current: ssl.SSLContext) -> None:
        self.current = current

    def wrap_bio(self, *arguments: Any, **settings: Any) -> ssl.SSLObject:
        """As `SSLContext.wrap_bio`, which asyncio calls for each connection."""
        return self.current.wrap_bio(*arguments, **settings)

    def wrap_socket(self, *arguments: Any, **settings: Any) -> ssl.SSLSocket:
        """As `SSLContext.wrap_socket`."""
        return self.current.wrap_socket(*arguments, **settings)
