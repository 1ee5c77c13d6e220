"""What is an address, and what Python raises for the rest."""

from __future__ import annotations

import socket

import pytest

from pdserve.base.addresses import is_host_port
from pdserve.net.streams import open_stream
from pdserve.v1 import decode_pb2 as pb

LABEL = "a" * 63
NAME = ".".join([LABEL, LABEL, LABEL, "a" * 61])


@pytest.mark.parametrize(
    "host",
    ["a", "decode-0.decode.pdserve.svc.cluster.local", "x.", "my_worker", "10.0.0.7", LABEL, NAME, f"{NAME}.",
     "[::1]", "[fe80::1%eth0]", "[fe80::1%eth0.100]", "[::ffff:10.0.0.7]"],
)  # fmt: skip
def test_names_and_addresses_are_addresses(host: str) -> None:
    assert is_host_port(f"{host}:7001")
    host.strip("[]").encode("idna")


@pytest.mark.parametrize(
    "host",
    ["a..b", "..", ".", ".a", "a..", f"{LABEL}a", f"x.{LABEL}a", f"{NAME}a", f"{NAME}a.", "",
     "[a..b]", "[::::]", "[fe80::1%a..b]", "[fe80::1%]", "[10.0.0.7]", "[1:2]"],
)  # fmt: skip
def test_hosts_that_python_cannot_connect_to_are_no_addresses(host: str) -> None:
    """`UnicodeError` ended a router with TLS, and a request's own handling of workers that are gone."""
    assert not is_host_port(f"{host}:7001")


@pytest.mark.parametrize("address", ["a..b:7001", f"{LABEL}a:7001", ".a:7001", "[a..b]:7001", "[::1]:70000", "::1:x"])
async def test_connecting_to_what_is_no_address_fails_as_connecting_does(address: str) -> None:
    with pytest.raises(OSError, match="is no address") as failed:
        await open_stream(address, pb.DecodeResponse.FromString)
    assert not isinstance(failed.value, socket.gaierror)
