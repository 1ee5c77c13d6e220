"""Files of secrets: made once, complete or absent, and readable by their owner and its group alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.__main__ import main
from pdserve.cli.cluster_secrets.contents import SecretGroup
from pdserve.cli.cluster_secrets.directory import write_missing

GROUP = SecretGroup(files={"clear": b"one", "digest": b"two"}, api_key="KEY")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"kept")
    shown: list[str] = []
    groups = [SecretGroup(files={"mine": b"new"}), GROUP]
    assert write_missing(tmp_path, groups, shown.append) == ["clear", "digest"]
    assert write_missing(tmp_path, groups, shown.append) == []
    assert contents(tmp_path) == {"mine": b"kept", "clear": b"one", "digest": b"two"}
    assert shown == ["KEY"]


def test_a_group_that_was_interrupted_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "clear").write_bytes(b"of the first attempt")
    (tmp_path / ".digest.new").write_bytes(b"of the first attempt")
    shown: list[str] = []
    write_missing(tmp_path, [GROUP], shown.append)
    assert contents(tmp_path) == {"clear": b"one", "digest": b"two"}
    assert shown == ["KEY"]


def test_no_file_is_there_before_its_key_was_shown(tmp_path: Path) -> None:
    def fail(_: str) -> None:
        assert contents(tmp_path) == {}
        raise BrokenPipeError

    with pytest.raises(SetupError):
        write_missing(tmp_path, [GROUP], fail)
    assert contents(tmp_path) == {}


def test_each_reader_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """Fails when a new secret has no reader, or one of another reader lands in a directory that it is given."""
    assert main(["secrets", "--to", str(tmp_path), "--by-reader"]) == 0
    found = {path.name: sorted(contents(path)) for path in tmp_path.iterdir()}
    assert found == {
        "metrics": ["metrics-key"],
        "peers": ["cluster-secret", "peer-ca.pem", "peer-key.pem", "peer.pem"],
        "redis": ["redis-password"],
        "router": ["api-keys.toml", "smoke-test-key"],
        "state": ["state-password"],
    }


def test_directories_of_an_earlier_version_get_what_they_lack_and_keep_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if an update makes new secrets, or none: services that run would refuse each other, or not start."""
    assert main(["secrets", "--to", str(tmp_path), "--by-reader"]) == 0
    (tmp_path / "state" / "state-password").unlink()
    before = {path.name: contents(path) for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main(["secrets", "--to", str(tmp_path), "--by-reader"]) == 0
    after = {path.name: contents(path) for path in tmp_path.iterdir()}
    assert len(after["state"].pop("state-password")) > 40
    assert after == before
    out, err = capsys.readouterr()
    assert (out, "state-password" in err) == ("", True)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_others_cannot_read_and_the_group_can(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_missing(tmp_path, [GROUP], print)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in GROUP.files} == {0o640}


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=f"Cannot write secrets to {tmp_path}/file/in"):
        write_missing(tmp_path / "file" / "in", [GROUP], print)


def test_the_command_prints_the_first_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secrets", "--to", str(tmp_path / "new")]) == 0
    out, err = capsys.readouterr()
    key = out.split()[-1]
    assert len(key) == 43
    assert key not in err
    assert main(["secrets", "--to", str(tmp_path / "new")]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "all of it is there" in err
