"""The `pdserve` command itself: help, version, unknown commands and imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdserve import __version__
from pdserve.cli.__main__ import COMMANDS, main


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_on_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    for name, text in COMMANDS.items():
        assert [name, text] in lines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: pdserve {name}" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdserve {__version__}\n"


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "'serve' is not a pdserve command" in error
    assert all(name in error for name in COMMANDS)


def test_the_supervisor_imports_neither_torch_nor_a_web_framework() -> None:
    code = "import sys, pdserve.cli.up; print(*sorted({'torch', 'aiohttp', 'grpc', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
