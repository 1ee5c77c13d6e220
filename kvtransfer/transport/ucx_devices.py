"""The network devices that UCX may use: by itself it would listen on all of them, whatever address a worker has."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

_LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
_INFINIBAND = Path("/sys/class/infiniband")


def devices_of(host: str) -> str | None:
    """The value of UCX_NET_DEVICES for a process with this address: its interface, and the host's RDMA devices.

    None where every interface is meant (0.0.0.0 or ::), or none has the address.
    """
    addresses = {
        name: [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }
    interface = interface_of(_resolved(host), addresses)
    return None if interface is None else ",".join([interface, *_rdma_ports()])


def interface_of(hosts: Iterable[str], addresses: Mapping[str, Iterable[str]]) -> str | None:
    """The interface that has one of these addresses; None: none has, or they stand for all."""
    wanted = {_parsed(host) for host in hosts}
    if any(address.is_unspecified for address in wanted):
        return None
    return next((name for name, texts in addresses.items() if wanted & {_parsed(text) for text in texts}), None)


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    # The loopback interface has all of 127.0.0.0/8, and lists one address.
    return _LOOPBACK if address.version == 4 and address.is_loopback else address


def _resolved(host: str) -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _rdma_ports() -> list[str]:
    """Ports of RDMA devices, such as mlx5_0:1: they have no IP address, and only RDMA can reach them."""
    return [f"{port.parent.parent.name}:{port.name}" for port in sorted(_INFINIBAND.glob("*/ports/*"))]
