"""Addresses: what is one, and that of this host or container, for settings with the value `auto`."""

from __future__ import annotations

import ipaddress
import re
import socket

AUTO = "auto"
_HOST_PORT = re.compile(
    r"(?:(?P<name>[A-Za-z0-9_.-]{1,254})|\[(?P<ipv6>[A-Za-z0-9:.%_-]{2,60})\]):(?P<port>[0-9]{1,5})"
)
_MAX_PORT = 65_535
#: Bytes of a name, and of each part between its dots. Python raises `UnicodeError` where it connects beyond that.
_MAX_NAME, _MAX_LABEL = 253, 63


def is_host_port(text: str) -> bool:
    """Whether this is `host:port`, and nothing else that a library would understand: no path, no other scheme."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match["port"]) > _MAX_PORT:
        return False
    if match["name"] is not None:
        name = match["name"].removesuffix(".")
        return len(name) <= _MAX_NAME and _has_labels(name)
    return _is_ipv6(match["ipv6"])


def _is_ipv6(text: str) -> bool:
    """With a zone or without one, whose dots count as those of a name where Python connects."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return _has_labels(text)


def _has_labels(name: str) -> bool:
    return all(1 <= len(label) <= _MAX_LABEL for label in name.split("."))


def parse_host(text: str) -> str:
    """An address to listen on; `auto` becomes the address that this host's name has. Raises ValueError."""
    return own_address() if text == AUTO else text


def parse_worker_id(text: str) -> str:
    """A worker's name; `auto` becomes the host's name, which in a container is the container's id."""
    return socket.gethostname() if text == AUTO else text


def own_address() -> str:
    """The first address of this host's name at which others can reach it. Raises ValueError."""
    name = socket.gethostname()
    try:
        found = [info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise ValueError(
            f"'auto' found no address for the host name {name!r} ({error.strerror}); write the address instead"
        ) from error
    for address in found:
        parsed = ipaddress.ip_address(str(address).partition("%")[0])
        if not (parsed.is_loopback or parsed.is_link_local):
            return str(parsed)
    raise ValueError(
        f"'auto' found only {', '.join(map(str, found))} for the host name {name!r}, which others cannot reach; "
        "write the address instead"
    )
