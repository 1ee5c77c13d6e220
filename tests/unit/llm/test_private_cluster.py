"""A cluster of its own, with fake services: what starts it, and that nothing is left, however its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.llm.private_cluster import PrivateCluster, up_arguments
from tests.unit.cli.fake_services import set_steps, with_fake_services
from tests.unit.cli.test_up import gone

OWNER = Path(__file__).with_name("owner.py")
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    return with_fake_services(tmp_path)


@pytest.fixture
def owner(workdir: Path) -> Iterator[Start]:
    started = []

    def start(action: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(OWNER), str(workdir / "tiny"), action],
            cwd=workdir,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(workdir), "XDG_STATE_HOME": str(workdir / "state")},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    # `pdserve up`, the router, one worker of each tier, Redis.
    assert len(pids) == 5
    return pids


def test_it_stops_on_request_and_leaves_nothing(workdir: Path, owner: Start) -> None:
    process = owner("stop")
    pids = _pids(process)
    left, errors = process.communicate(timeout=30)
    assert (left.strip(), errors, process.returncode) == ("", "", 0)
    assert gone(pids)
    assert not list(workdir.glob("pdserve-run-*"))
    [logs] = (workdir / "state" / "pdserve" / "logs").iterdir()
    assert {"up.log", "router.log", "redis.log"} <= {path.name for path in logs.iterdir()}


@pytest.mark.parametrize(
    ("action", "number"), [("raise", None), ("wait", signal.SIGKILL), ("wait", signal.SIGTERM), ("wait", signal.SIGINT)]
)
def test_it_never_outlives_its_owner(workdir: Path, owner: Start, action: str, number: signal.Signals | None) -> None:
    process = owner(action)
    pids = _pids(process)
    if number is not None:
        process.send_signal(number)
    process.wait(timeout=30)
    assert gone(pids)
    assert not list(workdir.glob("pdserve-run-*"))


def test_an_owner_that_ends_before_it_is_watched_is_noticed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for number in (ended.pid, os.getppid()):
        command = [sys.executable, "-m", "pdserve.llm.owned_up", str(number), "model"]
        assert subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 1


def test_why_it_does_not_start_is_the_error(workdir: Path, owner: Start) -> None:
    set_steps(workdir, "decode_svc", "notify=STATUS=error: No room for one block.", "exit=1")
    process = owner("stop")
    output, errors = process.communicate(timeout=30)
    assert "The cluster did not start: No room for one block. Logs: " in output
    assert errors == ""
    assert not list(workdir.glob("pdserve-run-*"))


def test_options_are_flags_of_up() -> None:
    arguments = up_arguments("m", {"max_model_len": 64, "lend_cores": False, "enforce_eager": True, "dtype": None})
    assert arguments == [
        "m",
        "--no-console",
        "--drain-timeout-s",
        "5",
        "--max-model-len",
        "64",
        "--no-lend-cores",
        "--enforce-eager",
    ]
    assert up_arguments("m", {"alias": ["a=m", "b=m"]})[-4:] == ["--alias", "a=m", "--alias", "b=m"]
    # What vLLM has is translated by `pdserve up`, which refuses some with advice.
    assert up_arguments("m", {"download_dir": "/x"})[-2:] == ["--download-dir", "/x"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_modellen": 5}, "no option 'max_modellen'. Did you mean 'max_model_len'"),
        ({"port": 5}, "no option 'port'"),
        ({"swap": 5}, r"Options are the flags of `pdserve up`"),
    ],
)
def test_unknown_options_are_refused_before_anything_starts(options: dict[str, object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        PrivateCluster("m", options)
