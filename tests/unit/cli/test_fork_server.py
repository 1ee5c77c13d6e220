"""Services that are forked instead of executed: as if they had been executed, and no one's death is theirs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdserve.cli.services import thread_environment
from pdserve.cli.supervisor import fork_server
from pdserve.cli.supervisor.backoff import BackoffPolicy
from pdserve.cli.supervisor.fork_server import ForkServer
from pdserve.cli.supervisor.spec import BecameReady, Died, ProcessSpec, Stopped
from pdserve.cli.supervisor.supervisor import Supervisor, supervising
from pdserve.cli.worker_forks import CPU_MODULES, GPU_MODULES, IMPORT_VARIABLES, WORKER_MODULES
from tests.support.redis import eventually
from tests.support.tiny_model import NAME, write_model
from tests.unit.cli.test_supervisor import Recorder, is_gone, wait_gone

READ = ("pdserve.model.vocabularies", "read_vocabularies")
SERVICE = "tests.unit.cli.fake_service"
FAKE_UP = str(Path(__file__).with_name("fake_up.py"))
AT_ONCE = BackoffPolicy(first_s=0.01, max_s=0.01)


@pytest.fixture
def events() -> Recorder:
    return Recorder()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ProcessSpec]:
    def spec(name: str, *steps: str, **environment: str) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", SERVICE, *steps),
            environment={**os.environ, **environment},
            log_path=tmp_path / f"{name}.log",
            is_forked=True,
        )

    return spec


def server(tmp_path: Path, *modules: str) -> ForkServer:
    forks = ForkServer((sys.executable,), modules or ("json", "socket"), dict(os.environ), tmp_path / "server.log")
    forks.prepare([])
    return forks


@asynccontextmanager
async def forking(events: Recorder, forks: ForkServer) -> AsyncIterator[Supervisor]:
    async with supervising(events, backoff=AT_ONCE) as supervisor:
        supervisor.fork_from(forks)
        yield supervisor


def descriptors(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}


def arguments(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def status_of(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(maxsplit=1)[1] for line in lines if line.startswith(field + ":"))


async def test_a_forked_process_is_as_if_it_had_been_executed(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    forks = server(tmp_path)
    async with forking(events, forks) as supervisor:
        spec = make("one", "variable=ONLY_HERE", "print=some output", "until-sigterm", ONLY_HERE="its value")
        await supervisor.start(spec)
        pid = events.pid("one")
        assert (os.getpgid(pid), os.getsid(pid), int(status_of(pid, "PPid"))) == (pid, pid, os.getpid())
        assert arguments(pid) == list(spec.argv)
        # Nothing of the fork server's: its end of the connection, pipes, blocked or ignored signals.
        assert forks.pid is not None
        assert descriptors(pid) & descriptors(forks.pid) == {"/dev/null"}
        assert str(spec.log_path) in descriptors(pid)
        assert int(status_of(pid, "SigBlk"), 16) == 0
        assert not int(status_of(pid, "SigIgn"), 16) & 1 << (signal.SIGINT - 1)
        await supervisor.stop()
    stopped = events.of(Stopped, "one")
    assert [event.exit.code for event in stopped if isinstance(event, Stopped)] == [0]
    assert spec.log_path.read_text().splitlines()[1:] == ["its value", "some output"]


async def test_forked_processes_are_reaped_and_restarted(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    forks = server(tmp_path)
    async with forking(events, forks) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        first = events.pid("one")
        os.kill(first, signal.SIGKILL)
        await events.until(lambda: len(events.of(BecameReady, "one")) == 2)
        assert events.pid("one") != first
        assert is_gone(first)
        died = events.of(Died, "one")[0]
        assert isinstance(died, Died)
        assert died.exit.describe() == "was killed by SIGKILL"


async def test_the_death_of_the_fork_server_ends_no_service_and_keeps_none_from_starting(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    forks = server(tmp_path)
    async with forking(events, forks) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        assert forks.pid is not None
        os.kill(forks.pid, signal.SIGKILL)
        os.kill(events.pid("one"), signal.SIGKILL)
        await events.until(lambda: len(events.of(BecameReady, "one")) == 2)
        await supervisor.start(make("two", "until-sigterm"))
        assert not events.of(Died, "two")
        assert len(events.of(Died, "one")) == 1


async def test_a_fork_server_that_hangs_is_replaced(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.cli.supervisor.fork_server._FORK_TIMEOUT_S", 0.2)
    forks = server(tmp_path)
    async with forking(events, forks) as supervisor:
        await forks.settled.wait()
        hung = forks.pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        await supervisor.start(make("one", "until-sigterm"))

        async def is_replaced() -> bool:
            return forks.pid not in (None, hung)

        await eventually(is_replaced)


async def test_calls_are_made_before_the_first_fork(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    calls = [(*READ, str(tmp_path / "missing")), (*READ, str(write_model(tmp_path / NAME)))]
    environment = {**os.environ, **thread_environment(1)}
    forks = ForkServer((sys.executable,), (READ[0],), environment, tmp_path / "server.log")
    async with forking(events, forks) as supervisor:
        forks.prepare(calls)
        await supervisor.start(make("one", f"cached={READ[0]}._read", "until-sigterm"))
        # A thread of the fork server could hold what is then never released in its forks.
        assert len(os.listdir(f"/proc/{forks.pid}/task")) == 1
    assert (tmp_path / "one.log").read_text().split()[-1] == "1"
    assert "SetupError" in (tmp_path / "server.log").read_text()


async def test_a_server_that_dies_before_its_calls_are_known_is_replaced(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a model is downloaded, which takes minutes. Fails where all services are executed from then on."""
    waits, waiting = fork_server._finishes_before_end, list[int]()

    async def noting(calls: asyncio.Future[bytes], pid: int) -> bool:
        waiting.append(pid)
        return await waits(calls, pid)

    async def has_imported() -> bool:
        return len(waiting) > 0

    monkeypatch.setattr(fork_server, "_finishes_before_end", noting)
    forks = ForkServer((sys.executable,), ("json",), dict(os.environ), tmp_path / "server.log")
    async with forking(events, forks) as supervisor:
        await eventually(has_imported)
        os.kill(waiting.pop(), signal.SIGKILL)
        await eventually(has_imported)
        forks.prepare([])
        await supervisor.start(make("one", "until-sigterm"))
        assert forks.pid == waiting[0]


async def test_where_calls_do_not_end_services_are_executed(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.cli.supervisor.fork_server._PREPARE_TIMEOUT_S", 0.2)
    forks = ForkServer((sys.executable,), ("builtins",), dict(os.environ), tmp_path / "server.log")
    os.mkfifo(tmp_path / "fifo")
    forks.prepare([("builtins", "open", str(tmp_path / "fifo"))])
    async with forking(events, forks) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        assert forks.pid is None


async def test_where_nothing_can_be_imported_services_are_executed(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    forks = server(tmp_path, "no_such_module")
    async with forking(events, forks) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        assert forks.pid is None
    assert "No module named 'no_such_module'" in (tmp_path / "server.log").read_text()


async def test_where_an_import_has_opened_a_gpu_services_are_executed(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A forked process could not use a GPU then. Fails where it is forked all the same."""
    forks = server(tmp_path, "tests.unit.cli.opens_gpu")
    async with forking(events, forks) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        assert forks.pid is None
    assert "an import, or a call, has opened /memfd:gpu (deleted)." in (tmp_path / "server.log").read_text()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == ["fork_server_given_up"]


async def test_variables_that_imports_have_set_stay_unless_the_service_has_its_own(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    """Fails where a library that read them when it was imported finds others later."""
    async with forking(events, server(tmp_path, "tests.unit.cli.sets_variables")) as supervisor:
        steps = ("variable=SET_BY_IMPORT", "variable=OF_BOTH", "until-sigterm")
        await supervisor.start(spec := make("one", *steps, OF_BOTH="of the service"))
    assert spec.log_path.read_text().splitlines()[1:] == ["by an import", "of the service"]


@pytest.mark.parametrize(
    ("modules", "library"), [(GPU_MODULES, "triton"), (CPU_MODULES, "ucxx")], ids=["on GPUs", "on CPUs"]
)
async def test_what_workers_import_opens_no_gpu_and_starts_no_thread(
    modules: tuple[str, ...], library: str, events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    """The first half on a machine with a GPU. Elsewhere it shows that all can be imported."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    environment = {**IMPORT_VARIABLES, **os.environ, **thread_environment(1)}
    modules = (*WORKER_MODULES, *modules)
    forks = ForkServer((sys.executable,), modules, environment, tmp_path / "server.log")
    forks.prepare([])
    async with forking(events, forks) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        assert forks.pid is not None, (tmp_path / "server.log").read_text()
        assert len(os.listdir(f"/proc/{forks.pid}/task")) == 1
        assert not [name for name in descriptors(forks.pid) if name.startswith("/dev/nvidia")]


@pytest.mark.skipif(None in map(find_spec, ("ucxx", "pynvml")), reason="ucxx or pynvml is not installed")
@pytest.mark.parametrize("is_in_fork_server", [True, False])
def test_the_fork_server_of_workers_on_cpus_does_not_ask_for_gpus(is_in_fork_server: bool) -> None:
    """Else it would open those of a machine whose cluster is on CPUs, and fork nothing. Elsewhere ucxx does ask."""
    code = """
import pynvml

pynvml.nvmlInit = lambda: print("asked")
import kvtransfer.transport.with_local
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment |= IMPORT_VARIABLES if is_in_fork_server else {"UCX_MEMTYPE_CACHE": "n"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ("asked" in out.stdout) == (not is_in_fork_server), out.stderr


def test_a_killed_supervisor_takes_forked_processes_with_it(tmp_path: Path) -> None:
    command = [sys.executable, FAKE_UP, str(tmp_path), SERVICE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(text) for text in supervisor.stdout.readline().split()]
        assert len(pids) == 3  # Two services, and the fork server.
        pidfds = [os.pidfd_open(pid) for pid in pids]
        supervisor.kill()
        assert all(wait_gone(pidfd) for pidfd in pidfds)
        for pidfd in pidfds:
            os.close(pidfd)
