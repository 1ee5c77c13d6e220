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


class _Received(io.RawIOBase):
    """Stands for a socket from which everything has been read. Only what is asked for is taken."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def makefile(self, *_: Any) -> _Unclosed:
        return _Unclosed(self, buffer_size=1)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._data[self.at : self.at + len(buffer)]
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


class _Unclosed(io.BufferedReader):
    """A reader whose end leaves the connection open for the next response."""

    def close(self) -> None:
        """Does nothing."""


def answers_of(received: bytes, sent: bytes) -> list[Answer]:
    """The responses in order, the last of which may be cut off within its body. `sent` says whether one is for HEAD.

    Raises `AssertionError` for bytes that are no response.
    """
    connection, found = _Received(received), []
    is_head = sent.lstrip(b"\r\n").startswith(b"HEAD ")
    while connection.at < len(received):
        rest = received[connection.at :]
        # A request of version 0.9 has its own version in the answer.
        assert re.match(rb"HTTP/(0\.9|1\.[01]) ", rest), f"no response: {rest[:200]!r}"
        response = http.client.HTTPResponse(connection, method="HEAD" if is_head else "GET")  # type: ignore[arg-type]
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
