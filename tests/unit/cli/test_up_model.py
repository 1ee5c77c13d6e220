"""`prepare_model` with processes that print what a test wants, and the command it runs."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli import prepare
from pdserve.cli.cluster_plan import PreparedModel
from pdserve.cli.stop_signals import finished_before
from pdserve.cli.up_model import describe_progress, prepare_command, prepare_model
from tests.support.deadline import DEADLINE_S


async def run(tmp_path: Path, code: str, seen: list[str] | None = None) -> PreparedModel:
    on_progress = (lambda _: None) if seen is None else seen.append
    return await prepare_model(
        [sys.executable, "-c", code], environment={}, log_path=tmp_path / "model.log", on_progress=on_progress
    )


async def test_progress_and_result_arrive(tmp_path: Path) -> None:
    code = """if True:
        print('{"doing": "Converting", "done_bytes": 0, "total_bytes": null}')
        print('{"path": "/m", "served_name": "tiny"}')"""
    seen: list[str] = []
    assert await run(tmp_path, code, seen) == PreparedModel(path=Path("/m"), served_name="tiny")
    assert seen == ["Converting"]


async def test_an_error_is_raised_as_its_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^No such model\.$"):
        await run(tmp_path, """print('{"error": "No such model."}')""")


async def test_a_crash_names_the_log_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"ended with exit code 1. Log: .*model\.log"):
        await run(tmp_path, "raise LookupError('inside')")
    assert "LookupError: inside" in (tmp_path / "model.log").read_text()


async def test_stopping_kills_the_process_and_its_children(tmp_path: Path) -> None:
    code = """if True:
        import json, subprocess, sys, threading
        helper = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        print(json.dumps({"doing": str(helper.pid), "done_bytes": 0, "total_bytes": None}), flush=True)
        threading.Event().wait()"""
    stop = asyncio.Event()
    helpers: list[int] = []

    def on_progress(text: str) -> None:
        helpers.append(os.pidfd_open(int(text)))
        stop.set()

    preparing = prepare_model(
        [sys.executable, "-c", code], environment={}, log_path=tmp_path / "log", on_progress=on_progress
    )
    async with asyncio.timeout(DEADLINE_S):
        assert not await finished_before(stop, preparing)
    assert select.select(helpers, [], [], DEADLINE_S)[0] == helpers
    os.close(helpers[0])


async def test_work_that_finishes_first_is_not_stopped() -> None:
    assert await finished_before(asyncio.Event(), asyncio.sleep(0))


async def test_work_that_fails_raises_its_own_error() -> None:
    async def fail() -> None:
        raise SetupError("broken")

    with pytest.raises(SetupError, match="broken"):
        await finished_before(asyncio.Event(), fail())


def test_progress_is_formatted_with_and_without_a_total() -> None:
    mib = 1024**2
    assert describe_progress("Downloading X", 12 * mib, 93 * mib) == "Downloading X: 12 of 93 MiB (13%)"
    assert describe_progress("Converting X", 5 * mib, None) == "Converting X: 5 MiB"
    assert describe_progress("Waiting", 0, None) == "Waiting"


def test_prepare_prints_one_line_for_a_model_it_cannot_resolve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert prepare.main(["no such model", str(tmp_path)]) == 1
    assert '{"error": "Model \'no such model\' is not a directory' in capsys.readouterr().out


def test_the_command_passes_the_cache_directory_if_given() -> None:
    assert prepare_command("m", None, ())[-1] == "m"
    assert prepare_command("m", "/c", ("-P",))[1:] == ["-P", "-m", "pdserve.cli.prepare", "m", "/c"]
