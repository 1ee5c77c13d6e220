"""Redis URLs and replies are checked before they are used."""

from __future__ import annotations

import pytest

from pdserve.base.errors import SetupError, StoreError
from pdserve.base.store import Reply, Store, as_bytes, as_fields, as_list


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://localhost:port"])
def test_a_malformed_url_is_refused_at_start(url: str) -> None:
    with pytest.raises(SetupError, match="redis://HOST:PORT"):
        Store(url)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://user:secret@cache.local:6380/0", "cache.local:6380"),
        ("redis://cache.local", "cache.local:6379"),
        ("unix:///run/redis.sock", "/run/redis.sock"),
    ],
)
def test_the_address_for_people_has_no_password(url: str, address: str) -> None:
    assert Store(url).address == address


@pytest.mark.parametrize("reply", [None, 1, [b"a"]])
def test_what_is_no_string_is_not_taken_for_one(reply: Reply) -> None:
    with pytest.raises(StoreError):
        as_bytes(reply)


@pytest.mark.parametrize("reply", [None, 1, b"a"])
def test_what_is_no_list_is_not_taken_for_one(reply: Reply) -> None:
    with pytest.raises(StoreError):
        as_list(reply)


def test_fields_are_pairs() -> None:
    assert as_fields([b"a", b"1", b"b", b"\xff"]) == {"a": b"1", "b": b"\xff"}
    with pytest.raises(StoreError):
        as_fields([b"a"])
