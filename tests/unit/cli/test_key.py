"""New API keys: shown once, and in the file of keys by their digest alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pdserve.cli.__main__ import main
from router_svc.clients.keys import KeyTable, parse_keys


def made(output: str) -> str:
    return output.split("shown this once: ")[1].split()[0]


def test_a_key_is_added_to_a_file_that_routers_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    assert main(["key", "a", "--file", str(path)]) == 0
    path.chmod(0o600)
    first = made(capsys.readouterr().out)
    assert main(["key", "b", "--tenant", "t", "--admin", "--file", str(path)]) == 0
    second = made(capsys.readouterr().out)
    text = path.read_text(encoding="utf-8")
    assert first not in text
    table = KeyTable(parse_keys(text, str(path)))
    clients = [found.client for key in (first, second) if (found := table.find(key)) is not None]
    assert [(client.id, client.tenant, client.is_admin) for client in clients] == [("a", "a", False), ("b", "t", True)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["keys.toml"]


def test_without_a_file_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "prometheus", "--metrics"]) == 0
    out = capsys.readouterr().out
    [key] = parse_keys(out[out.index("[[keys]]") :], "printed")
    assert key.client.reads_metrics_only


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "'' is not a name"),
        (["a b"], "'a b' is not a name"),
        (["a", "--tenant", 'x"'], "is not a name"),
        (["a", "--admin", "--metrics"], "may do nothing else"),
        (["a", "--file", "{}/keys.json"], "this command writes TOML"),
        (["a", "--file", "{}/taken.toml"], "has a key with the id a"),
        (["a", "--file", "{}/broken.toml"], "not valid TOML"),
        (["a", "--file", "{}/absent/keys.toml"], "No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_said_and_makes_no_key(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.toml").write_text('[[keys]]\nid = "a"\n')
    (tmp_path / "broken.toml").write_text("[[keys")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["key", *(each.format(tmp_path) for each in arguments)]) == 1
    out, err = capsys.readouterr()
    assert reason in err
    assert out == ""
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
