"""Opens token streams. With TLS, some are open ahead of the requests that need them: a handshake takes milliseconds.

A stream serves one request. After each request with TLS, a stream for the next one is opened to the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from pdserve.net.streams import MessageStream, open_stream
from pdserve.peers.peer_tls import PeerTls

Incoming = TypeVar("Incoming")

#: Spare streams per address, and the time after which one is closed: well before the worker does it.
_MAX_SPARE, _MAX_AGE_S = 2, 5.0
#: Time for which a handshake for later requests waits, so that it does not hold up the request that caused it.
_DELAY_S = 0.02


class StreamPool(Generic[Incoming]):
    """Belongs to one event loop. Without `run`, it opens each stream when it is needed."""

    def __init__(self, parse: Callable[[bytes], Incoming], tls: PeerTls | None = None) -> None:
        """`parse` turns bytes into a message. `tls`: certificates; None: no TLS."""
        self._parse = parse
        self._tls = tls
        #: Spare streams by address, with the times at which they were opened, the oldest first.
        self._spare: dict[str, deque[tuple[float, MessageStream[Incoming]]]] = {}
        self._wanted: deque[str] = deque(maxlen=64)
        self._wake = asyncio.Event()

    async def open(self, address: str) -> MessageStream[Incoming]:
        """A stream to `host:port`, which the caller closes. Raises `OSError`, of which `TimeoutError` is one."""
        if self._tls is None:
            return await open_stream(address, self._parse)
        self._wanted.append(address)
        self._wake.set()
        self._close_old()
        spare = self._spare.get(address)
        return spare.popleft()[1] if spare else await open_stream(address, self._parse, self._tls)

    async def run(self) -> None:
        """Opens spare streams until cancelled, and closes them then."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_MAX_AGE_S if self._spare else None):
                        await self._wake.wait()
                self._wake.clear()
                self._close_old()
                if self._wanted:
                    await asyncio.sleep(_DELAY_S)
                while self._wanted:
                    await self._add(self._wanted.popleft())
        finally:
            for spare in self._spare.values():
                for _, stream in spare:
                    stream.close()
            self._spare.clear()

    async def _add(self, address: str) -> None:
        if len(self._spare.get(address, ())) >= _MAX_SPARE:
            return
        # The next request finds out for itself that a worker is gone.
        with contextlib.suppress(OSError):
            stream = await open_stream(address, self._parse, self._tls)
            self._spare.setdefault(address, deque()).append((self._now(), stream))

    def _close_old(self) -> None:
        """Closes the streams that are old, and forgets those that the worker has closed."""
        now = self._now()
        for address, spare in list(self._spare.items()):
            kept = [(at, each) for at, each in spare if each.is_open and now - at < _MAX_AGE_S]
            for _, stream in spare:
                if all(stream is not each for _, each in kept):
                    stream.close()
            if kept:
                self._spare[address] = deque(kept)
            else:
                del self._spare[address]

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
