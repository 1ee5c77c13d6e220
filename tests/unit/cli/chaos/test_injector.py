"""Faults on a real process: it stands still, or has no file to open or to write, and is as before afterwards."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from pdserve.cli.chaos.injector import LASTING

#: Answers each line with whether it can open a file, and whether it can write one.
_PROGRAM = """
import sys, tempfile
kept = tempfile.TemporaryFile(buffering=0)
print("ready", flush=True)
for line in sys.stdin:
    found = []
    for action in (lambda: open("/dev/null").close(), lambda: kept.write(b"x")):
        try:
            action()
            found.append("yes")
        except OSError:
            found.append("no")
    print(*found, flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield running
        running.kill()


def can_open_and_write(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("kind", "found"), [("descriptors", "no yes"), ("files", "yes no")])
async def test_a_limit_holds_for_the_time_of_the_fault(process: subprocess.Popen[str], kind: str, found: str) -> None:
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE), resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    assert can_open_and_write(process) == "yes yes"
    async with LASTING[kind](process.pid):
        assert can_open_and_write(process) == found
    assert can_open_and_write(process) == "yes yes"
    after = resource.prlimit(process.pid, resource.RLIMIT_NOFILE), resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    assert after == limits


async def test_a_stopped_process_goes_on_even_if_the_run_is_cancelled(process: subprocess.Popen[str]) -> None:
    stopped = asyncio.Event()

    async def hold() -> None:
        async with LASTING["stop-worker"](process.pid):
            stopped.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await stopped.wait()
    found = psutil.Process(process.pid)
    while found.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 (the signal is delivered, then acted upon)
        await asyncio.sleep(0)
    holding.cancel()
    await asyncio.wait([holding])
    assert can_open_and_write(process) == "yes yes"


@pytest.mark.parametrize("kind", list(LASTING))
async def test_a_process_that_has_ended_is_no_error(process: subprocess.Popen[str], kind: str) -> None:
    process.kill()
    process.wait()
    async with LASTING[kind](process.pid):
        pass
