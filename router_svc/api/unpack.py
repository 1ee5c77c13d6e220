"""Compressed request bodies: unpacked in steps, so that what they cost is known before it is paid.

aiohttp would unpack by itself, but also the rest of a body that is refused, while it waits for the body's end.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from pdserve.base.errors import RequestError, UnsupportedMediaType

#: Bytes that are unpacked at a time.
_STEP_BYTES = 65_536
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
#: Method in the first byte of a zlib header. Some clients send deflate without one.
_METHOD, _DEFLATE = 0x0F, 8


class Unpacker:
    """One body on its way."""

    def __init__(self, encodings: Sequence[str]) -> None:
        """Takes the values of Content-Encoding. Raises `UnsupportedMediaType` for others than gzip and deflate."""
        named = ", ".join(encodings).strip().lower()
        if named not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise UnsupportedMediaType(
                f"The request has the Content-Encoding {named[:100]!r}. Send gzip, deflate, or a plain body."
            )
        self._is_plain = named in ("", "identity")
        self._is_deflate = named == "deflate"
        self._unpacker: zlib._Decompress | None = None

    def take(self, data: bytes) -> Iterator[bytes]:
        """What these bytes unpack to, in pieces. Each is made when it is asked for. Raises `RequestError`."""
        if self._is_plain:
            yield data
            return
        if self._unpacker is None:
            is_raw = self._is_deflate and data[0] & _METHOD != _DEFLATE
            self._unpacker = zlib.decompressobj(_RAW if is_raw else _ZLIB if self._is_deflate else _GZIP)
        while data:
            if self._unpacker.eof:
                raise RequestError("The request body goes on behind the end of its compressed data. Send one stream.")
            try:
                yield self._unpacker.decompress(data, _STEP_BYTES)
            except zlib.error as error:
                raise RequestError(f"The request body cannot be unpacked: {error}. Send it uncompressed.") from None
            data = self._unpacker.unconsumed_tail or self._unpacker.unused_data

    def finish(self) -> Iterator[bytes]:
        """The rest, once all bytes were taken. Raises `RequestError` for a body that was cut off."""
        if self._unpacker is None:
            return
        while rest := self._unpacker.decompress(b"", _STEP_BYTES):
            yield rest
        if not self._unpacker.eof:
            raise RequestError("The compressed request body ends too early. Send all of it.")
