"""Reads what an HTTP server has sent over one connection, strictly."""

from __future__ import annotations

import http.client
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response. The body of a HEAD request's answer is empty."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    is_head: bool


class _Sent:
    """Stands for a socket from which everything has been read."""

    def __init__(self, stream: io.BytesIO) -> None:
        self._stream = stream

    def makefile(self, *_: Any) -> _Unclosed:
        return _Unclosed(self._stream)


class _Unclosed(io.BufferedReader):
    """A reader whose end leaves the stream open for the next response."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(_Raw(stream), buffer_size=1)

    def close(self) -> None:
        """Does nothing."""


class _Raw(io.RawIOBase):
    def __init__(self, stream: io.BytesIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def answers_of(received: bytes, sent: bytes) -> list[Answer]:
    """The responses in order, the last of which may be cut off within its body. `sent` says whether one is for HEAD.

    Raises `AssertionError` for bytes that are no response.
    """
    stream, found = io.BytesIO(received), []
    is_head = sent.lstrip(b"\r\n").startswith(b"HEAD ")
    while stream.tell() < len(received):
        # A request of version 0.9 has its own version in the answer.
        assert re.match(rb"HTTP/(0\.9|1\.[01]) ", received[stream.tell() :]), f"no response: {received[:200]!r}"
        response = http.client.HTTPResponse(_Sent(stream), method="HEAD" if is_head else "GET")  # type: ignore[arg-type]
        response.begin()
        try:
            content = response.read()
        except http.client.IncompleteRead as error:
            content = error.partial
        found.append(
            Answer(status=response.status, headers=response.headers, content=content, is_head=is_head)  # type: ignore[arg-type]
        )
        # Which of several requests was for HEAD is known of the first one only.
        if b"HEAD " in sent:
            break
    return found
