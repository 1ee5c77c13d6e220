"""The ids of one client request: what the client, the workers and the books know it by."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from pdserve.base.ids import RequestId

#: What a client may choose as an id. It becomes part of log lines, of Redis keys and of headers.
_VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def is_valid_id(text: str) -> bool:
    """Whether a client may use this as a request id."""
    return _VALID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """`header` is X-Request-Id; the response's id is a prefix for the API and that."""

    prefix: str
    header: str
    #: Clients repeat ids, proxies do when they retry; what workers fence by must not repeat.
    nonce: str = ""

    @classmethod
    def make(cls, prefix: str, chosen: str | None) -> Ids:
        """With the client's own id when it sent a valid one."""
        if chosen is None or not is_valid_id(chosen):
            return cls(prefix=prefix, header=secrets.token_hex(16))
        return cls(prefix=prefix, header=chosen, nonce=secrets.token_hex(4))

    @property
    def response(self) -> str:
        """The `id` of the response."""
        return self.prefix + self.header

    def of_prompt(self, index: int) -> RequestId:
        """The id of one prompt. The first has the response's own, so that a trace needs no knowledge of prompts."""
        return RequestId(f"{self.response}-{index}" if index else self.response)

    def for_workers(self, index: int) -> RequestId:
        """As `of_prompt`, and unique."""
        return RequestId(f"{self.of_prompt(index)}-{self.nonce}" if self.nonce else self.of_prompt(index))
