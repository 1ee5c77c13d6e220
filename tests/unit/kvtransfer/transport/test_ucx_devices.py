"""The network device of an address, which is the only one that UCX listens on."""

from __future__ import annotations

import pytest

from kvtransfer.transport.ucx_devices import devices_of, interface_of

ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.0.2.2", "fe80::1%eth0"],
    "eth1": ["198.51.100.7", "2001:db8::7"],
}


@pytest.mark.parametrize(
    ("host", "interface"),
    [
        ("127.0.0.1", "lo"),
        ("127.0.0.53", "lo"),
        ("::1", "lo"),
        ("192.0.2.2", "eth0"),
        ("fe80::1", "eth0"),
        ("2001:db8::7", "eth1"),
        ("0.0.0.0", None),
        ("::", None),
        ("203.0.113.9", None),
    ],
)
def test_the_device_is_the_one_that_has_the_address(host: str, interface: str | None) -> None:
    assert interface_of([host], ADDRESSES) == interface


def test_a_name_with_several_addresses_means_the_first_device_that_has_one() -> None:
    assert interface_of(["203.0.113.9", "198.51.100.7"], ADDRESSES) == "eth1"
    assert interface_of([], ADDRESSES) is None


def test_loopback_is_a_device_of_every_machine() -> None:
    devices = devices_of("127.0.0.1")
    assert devices is not None
    assert devices.split(",")[0].startswith("lo")
    assert devices_of("0.0.0.0") is None
    assert devices_of("name.invalid") is None
