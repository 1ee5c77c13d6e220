"""The ids of one client request, for the client, the workers and the records."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from pdserve.base.ids import RequestId

#: Ids that clients may choose. They become part of log lines, Redis keys and headers.
_VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
#: Before the index of a prompt. No chosen id has it, so that no two prompts have one id.
_SEPARATOR = ":"
#: Chosen ids, and those made from them: with the API's prefix, and with the index of a prompt.
_TRACEABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,143}(:[0-9]{1,3})?", re.ASCII)


def is_valid_id(text: str) -> bool:
    """Whether a client may use this as a request id."""
    return _VALID.fullmatch(text) is not None


def is_traceable_id(text: str) -> bool:
    """Whether a decision record can have this id."""
    return _TRACEABLE.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """`header` is X-Request-Id. The response's id is the API's prefix followed by `header`."""

    prefix: str
    header: str
    #: Makes the ids for workers unique, which they need for fencing: clients and retrying proxies repeat ids.
    nonce: str = ""

    @classmethod
    def make(cls, prefix: str, chosen: str | None) -> Ids:
        """Ids from the client's own id if it is valid, else from a random one."""
        if chosen is None or not is_valid_id(chosen):
            return cls(prefix=prefix, header=secrets.token_hex(16))
        return cls(prefix=prefix, header=chosen, nonce=secrets.token_hex(4))

    @property
    def is_chosen(self) -> bool:
        """Whether the client has chosen the id, and knows it before any answer."""
        return bool(self.nonce)

    @property
    def response(self) -> str:
        """The `id` of the response."""
        return self.prefix + self.header

    def of_prompt(self, index: int) -> RequestId:
        """The id of one prompt. The first prompt has the response's id, by which `pdserve trace` finds it."""
        return RequestId(f"{self.response}{_SEPARATOR}{index}" if index else self.response)

    def for_workers(self, index: int) -> RequestId:
        """The id of one prompt for workers, which is unique."""
        return RequestId(f"{self.of_prompt(index)}-{self.nonce}" if self.nonce else self.of_prompt(index))
