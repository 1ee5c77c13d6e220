"""The supervisor with real processes: readiness, restarts, stop stages, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.base.errors import PdserveError, SetupError
from pdserve.cli.supervisor.backoff import BackoffPolicy
from pdserve.cli.supervisor.spec import (
    BecameReady,
    Died,
    ProcessEvent,
    ProcessSpec,
    ProcessStarted,
    StartFailed,
    StatusChanged,
    Stopped,
)
from pdserve.cli.supervisor.supervisor import supervising
from tests.support.deadline import DEADLINE_S

FAKE_SERVICE = str(Path(__file__).with_name("fake_service.py"))
FAKE_UP = str(Path(__file__).with_name("fake_up.py"))
AT_ONCE = BackoffPolicy(first_s=0.01, max_s=0.01)


class Recorder:
    """Keeps the events and lets a test wait for one."""

    def __init__(self) -> None:
        self.events: list[ProcessEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self._changed.set()

    def of(self, kind: type[ProcessEvent], name: str | None = None) -> list[ProcessEvent]:
        return [event for event in self.events if isinstance(event, kind) and name in (None, event.spec.name)]

    def pid(self, name: str) -> int:
        last = self.of(ProcessStarted, name)[-1]
        assert isinstance(last, ProcessStarted)
        return last.pid

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def events() -> Recorder:
    return Recorder()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ProcessSpec]:
    def spec(name: str, *steps: str, **settings: object) -> ProcessSpec:
        values: dict[str, object] = {
            "argv": (sys.executable, FAKE_SERVICE, *steps),
            "environment": dict(os.environ),
            "log_path": tmp_path / f"{name}.log",
            **settings,
        }
        return ProcessSpec(name=name, **values)  # type: ignore[arg-type]

    return spec


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_gone(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


async def test_start_returns_once_all_processes_are_ready(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    async with supervising(events) as supervisor:
        await supervisor.start(make("one", "notify=STATUS=loading", "until-sigterm"), make("two", "until-sigterm"))
        assert {event.spec.name for event in events.of(BecameReady)} == {"one", "two"}
        status = events.of(StatusChanged, "one")[0]
        assert isinstance(status, StatusChanged)
        assert status.text == "loading"


async def test_a_probe_replaces_the_notification_of_a_program_without_one(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    probed = asyncio.Event()

    async def probe() -> None:
        probed.set()

    async with supervising(events) as supervisor:
        await supervisor.start(make("mute", "forever", probe=probe))
        assert probed.is_set()
        assert events.of(BecameReady, "mute")


async def test_a_failing_probe_fails_the_start(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    async def probe() -> None:
        raise PdserveError("no answer")

    with pytest.raises(StartFailed, match="no answer"):
        async with supervising(events) as supervisor:
            await supervisor.start(make("mute", "forever", probe=probe))


async def test_a_process_that_stops_to_report_that_it_is_alive_is_restarted(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    async with supervising(events, backoff=AT_ONCE) as supervisor:
        await supervisor.start(make("hung", "notify=WATCHDOG=1", "until-sigterm", hang_timeout_s=0.1))
        await events.until(lambda: len(events.of(BecameReady, "hung")) == 2)
        died = events.of(Died, "hung")[0]
        assert isinstance(died, Died)
        assert "no sign of life for 0.1 s" in died.exit.reason


async def test_a_process_that_never_reports_that_it_is_alive_is_not_killed_for_it(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    async with supervising(events, backoff=AT_ONCE) as supervisor:
        mute = make("mute", "until-sigterm", hang_timeout_s=0.01)
        hung = make("hung", "notify=WATCHDOG=1", "until-sigterm", hang_timeout_s=0.01)
        await supervisor.start(mute, hung)
        await events.until(lambda: bool(events.of(Died, "hung")))
        assert not events.of(Died, "mute")


async def test_leaving_the_block_ends_every_process(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    async with supervising(events) as supervisor:
        await supervisor.start(make("stubborn", "ignore-sigterm", "notify=READY=1", "forever"))
        pid = events.pid("stubborn")
        assert not is_gone(pid)
    assert is_gone(pid)


async def test_an_exception_in_the_block_ends_every_process(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    with pytest.raises(LookupError, match="ours"):
        async with supervising(events) as supervisor:
            await supervisor.start(make("one", "until-sigterm"))
            raise LookupError("ours")
    assert is_gone(events.pid("one"))


async def test_a_setup_error_fails_the_start_with_its_one_line(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    good = make("good", "until-sigterm")
    bad = make("bad", "notify=STATUS=error: The port is taken.", "print=error: another line", "exit=1")
    with pytest.raises(SetupError) as caught:
        async with supervising(events) as supervisor:
            await supervisor.start(good, bad)
    assert str(caught.value) == "The port is taken."
    assert is_gone(events.pid("good"))


async def test_without_a_notification_the_logs_error_line_is_the_reason(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    bad = make("bad", "print=loading", "print=error: No such model.", "exit=1")
    bad.log_path.write_text("error: from an earlier run\n")
    with pytest.raises(StartFailed) as caught:
        async with supervising(events) as supervisor:
            await supervisor.start(bad)
    assert str(caught.value) == "No such model."


async def test_an_exit_without_an_error_names_the_code_and_the_log(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    bad = make("bad", "print=Segfault in foo", "exit=7")
    with pytest.raises(StartFailed, match=r"bad exited with code 7 before it was ready: Segfault in foo \(log: .*bad"):
        async with supervising(events) as supervisor:
            await supervisor.start(bad)


async def test_a_kill_from_outside_while_starting_hints_at_memory(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    with pytest.raises(StartFailed, match=r"was killed by SIGKILL before it was ready.*out of memory\?"):
        async with supervising(events) as supervisor, asyncio.TaskGroup() as group:
            group.create_task(kill_when_started(events, "big"))
            try:
                await supervisor.start(make("big", "forever"))
            except StartFailed as error:
                failure = error
        raise failure


async def kill_when_started(events: Recorder, name: str) -> None:
    await events.until(lambda: bool(events.of(ProcessStarted, name)))
    os.kill(events.pid(name), signal.SIGKILL)


async def test_a_program_that_does_not_exist_fails_the_start(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    with pytest.raises(StartFailed, match="Cannot run /no/such/program: No such file or directory"):
        async with supervising(events) as supervisor:
            await supervisor.start(make("bad", argv=("/no/such/program",)))


async def test_a_log_that_cannot_be_written_fails_the_start(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    with pytest.raises(StartFailed, match="Cannot start bad"):
        async with supervising(events) as supervisor:
            await supervisor.start(make("bad", "until-sigterm", log_path=Path("/dev/null/bad.log")))


async def test_missing_the_ready_timeout_fails_the_start_and_names_the_last_status(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    slow = make("slow", "notify=STATUS=loading weights", "forever", ready_timeout_s=3.0)
    with pytest.raises(StartFailed, match=r"slow was not ready within 3 s; its last status was 'loading weights'"):
        async with supervising(events) as supervisor:
            await supervisor.start(slow)
    assert is_gone(events.pid("slow"))


async def test_a_killed_process_is_restarted(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    async with supervising(events, backoff=AT_ONCE) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        first = events.pid("one")
        os.kill(first, signal.SIGKILL)
        await events.until(lambda: len(events.of(BecameReady)) == 2)
        died = events.of(Died)[0]
        assert isinstance(died, Died)
        assert died.exit.describe() == "was killed by SIGKILL"
        assert died.restart_in_s == 0.0
        assert events.pid("one") != first
        again = events.of(BecameReady)[1]
        assert isinstance(again, BecameReady)
        assert again.is_restart


async def test_a_setup_error_after_the_first_start_is_retried(
    events: Recorder, make: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    # A link to the program is replaced while it runs, so that only the first incarnation works.
    program = tmp_path / "program"
    program.symlink_to(FAKE_SERVICE)
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('error: no memory')")
    async with supervising(events, backoff=AT_ONCE) as supervisor:
        await supervisor.start(make("one", argv=(sys.executable, str(program), "until-sigterm")))
        program.unlink()
        program.symlink_to(broken)
        os.kill(events.pid("one"), signal.SIGKILL)
        await events.until(lambda: len(events.of(Died)) == 3)
        last = events.of(Died)[-1]
        assert isinstance(last, Died)
        assert last.exit.reason == "error: no memory"
        program.unlink()
        program.symlink_to(FAKE_SERVICE)
        await events.until(lambda: len(events.of(BecameReady)) == 2)


async def test_children_of_a_dead_process_are_killed_too(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    async with supervising(events, backoff=BackoffPolicy(first_s=60)) as supervisor:
        await supervisor.start(make("one", "grandchild", "until-sigterm"))
        status = events.of(StatusChanged)[0]
        assert isinstance(status, StatusChanged)
        helper = os.pidfd_open(int(status.text.split()[1]))
        os.kill(events.pid("one"), signal.SIGKILL)
        await events.until(lambda: bool(events.of(Died)))
        assert await asyncio.to_thread(wait_gone, helper)
        os.close(helper)


async def test_a_stage_is_stopped_only_after_all_lower_ones_have_ended(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    async with supervising(events) as supervisor:
        await supervisor.start(
            make("redis", "until-sigterm", stop_stage=2),
            make("router", "until-sigterm", stop_stage=0),
            make("worker", "until-sigterm", stop_stage=1),
        )
        await supervisor.stop()
    stops = [(type(event).__name__, event.spec.name) for event in events.events if "Stop" in type(event).__name__]
    assert stops == [(kind, name) for name in ("router", "worker", "redis") for kind in ("Stopping", "Stopped")]
    assert all(event.exit.code == 0 and not event.forced for event in events.of(Stopped) if isinstance(event, Stopped))


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(
    events: Recorder, make: Callable[..., ProcessSpec]
) -> None:
    async with supervising(events) as supervisor:
        await supervisor.start(make("stubborn", "ignore-sigterm", "notify=READY=1", "forever", stop_grace_s=0.05))
        await supervisor.stop()
        stopped = events.of(Stopped)[0]
        assert isinstance(stopped, Stopped)
        assert stopped.forced


async def test_hurry_ends_a_running_stop_at_once(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    async with supervising(events) as supervisor:
        await supervisor.start(
            make("stubborn", "ignore-sigterm", "notify=READY=1", "forever", stop_grace_s=3600.0),
            make("last", "until-sigterm", stop_stage=1),
        )
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(supervisor.stop())
            await events.until(lambda: any("Stopping" in type(event).__name__ for event in events.events))
            supervisor.hurry()
    assert is_gone(events.pid("stubborn"))
    assert is_gone(events.pid("last"))


async def test_nothing_is_restarted_while_stopping(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    async with supervising(events, backoff=AT_ONCE) as supervisor:
        await supervisor.start(
            make("router", "ignore-sigterm", "notify=READY=1", "forever"), make("worker", "until-sigterm", stop_stage=1)
        )
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(supervisor.stop())
            await events.until(lambda: any("Stopping" in type(event).__name__ for event in events.events))
            worker = os.pidfd_open(events.pid("worker"))
            os.kill(events.pid("worker"), signal.SIGKILL)
            assert await asyncio.to_thread(wait_gone, worker)
            os.close(worker)
            os.kill(events.pid("router"), signal.SIGKILL)
    assert len(events.of(ProcessStarted, "worker")) == 1
    assert not events.of(Died)


async def test_stopping_ends_the_wait_for_a_restart(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    hour = BackoffPolicy(first_s=3600, max_s=3600, stable_s=3600)
    async with asyncio.timeout(DEADLINE_S), supervising(events, backoff=hour) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        os.kill(events.pid("one"), signal.SIGKILL)
        await events.until(lambda: len(events.of(BecameReady)) == 2)
        os.kill(events.pid("one"), signal.SIGKILL)
        await events.until(lambda: len(events.of(Died)) == 2)
        await supervisor.stop()
    assert len(events.of(ProcessStarted)) == 2


async def test_each_child_has_its_own_session(events: Recorder, make: Callable[..., ProcessSpec]) -> None:
    async with supervising(events) as supervisor:
        await supervisor.start(make("one", "until-sigterm"))
        pid = events.pid("one")
        assert os.getsid(pid) == pid != os.getsid(0)


def test_kill_9_of_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, FAKE_UP, str(tmp_path)], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(text) for text in supervisor.stdout.readline().split()]
        assert len(pids) == 2
        pidfds = [os.pidfd_open(pid) for pid in pids]
        supervisor.kill()
        assert all(wait_gone(pidfd) for pidfd in pidfds)
        for pidfd in pidfds:
            os.close(pidfd)
