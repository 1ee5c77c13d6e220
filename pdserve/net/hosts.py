"""Which `Host` headers a listener takes. This stops DNS rebinding: a web page's name comes to mean this machine.

Only a name can be rebound, so a literal address passes. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from pdserve.base.errors import Forbidden

#: Stands for every name.
ANY = "*"
_HOST = re.compile(r"(?P<name>\[[^\[\]]+\]|[^:\[\]/@\\\s]+)(:\d{1,5})?")
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedHosts:
    """The names under which a listener may be called; None: any."""

    names: frozenset[str] | None = None

    @classmethod
    def of_listener(cls, host: str, extra: Collection[str] = ()) -> AllowedHosts:
        """Allows `localhost` and `extra`; any name with `*`, or without `extra` on a listener beyond loopback."""
        if ANY in extra or not (extra or _is_loopback(host)):
            return cls()
        return cls(names=frozenset({"localhost", *(name.lower().rstrip(".") for name in extra)}))

    def check(self, headers: Sequence[str]) -> None:
        """Raises `Forbidden` unless all `Host` headers of a request are allowed. No browser omits the header."""
        for header in headers:
            if not self._allows(header):
                raise Forbidden(
                    f"The Host header is {header[:_MAX_SHOWN]!r}, which is no name of this server. "
                    "Use its address, or allow the name with --allowed-hosts."
                )

    def _allows(self, header: str) -> bool:
        if self.names is None:
            return True
        match = _HOST.fullmatch(header)
        if match is None:
            return False
        name = match["name"].strip("[]").lower().removesuffix(".")
        return name in self.names or _is_address(name)


def parse_names(text: str) -> tuple[str, ...]:
    """The words of a list that is divided by spaces or commas."""
    return tuple(word for word in re.split(r"[\s,]+", text) if word)


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins as a JSON list, as for `vllm serve`, or divided by spaces or commas. Raises ValueError."""
    if not text.lstrip().startswith("["):
        return parse_names(text)
    origins = json.loads(text)
    if not all(isinstance(origin, str) for origin in origins):
        raise ValueError(f"{text!r} is not a list of origins such as https://chat.example.com")
    return tuple(origins)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    return _is_address(host) and ip_address(host).is_loopback
