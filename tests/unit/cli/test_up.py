"""`pdserve up` in its own process, with a real private Redis and fake services that only report readiness."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.cli.free_ports import free_port
from pdserve.cli.private_redis import find_redis_server
from tests.support.deadline import DEADLINE_S
from tests.unit.cli.fake_services import set_steps, with_fake_services


class Up:
    """A running `pdserve up` and its output so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.output = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        """Waits until the output after the last match contains `pattern`."""
        seen = ""
        deadline = time.monotonic() + DEADLINE_S
        assert self.process.stdout is not None
        while (match := re.search(pattern, seen)) is None:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.output}"
            data = os.read(self.process.stdout.fileno(), 1)
            assert data, f"the process ended without printing {pattern!r}: {self.output}"
            seen += data.decode(errors="replace")
            self.output += data.decode(errors="replace")
        return match

    def finish(self) -> int:
        """Waits for the end of the process; returns its exit code."""
        rest, _ = self.process.communicate(timeout=DEADLINE_S)
        self.output += rest.decode()
        return self.process.returncode

    def children(self) -> list[int]:
        """Ids of its child processes."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A working directory with a model, and with fake services that `python -m` finds before the real ones."""
    return with_fake_services(tmp_path)


@pytest.fixture
def up(workdir: Path) -> Iterator[Callable[..., Up]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> Up:
        command = [sys.executable, "-m", "pdserve.cli", "up", str(workdir / "tiny"), "--log-dir", str(workdir / "logs")]
        process = subprocess.Popen(
            [*command, "--port", str(free_port()), "--grpc-port", str(free_port()), *flags],
            cwd=workdir,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(workdir), "PDSERVE_UP__FORK_WORKERS": "0"},
        )
        started.append(process)
        return Up(process)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def gone(pids: list[int]) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + DEADLINE_S
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        os.close(pidfd)
        if not ended:
            return False
    return True


def test_ready_text_shows_how_to_use_the_cluster_and_ctrl_c_drains_in_order(
    up: Callable[..., Up], workdir: Path
) -> None:
    cluster = up("--prefill", "1", "--decode", "2")
    cluster.read_until(r"prefill-0: loading the model")
    url = cluster.read_until(r"API: (http://127\.0\.0\.1:\d+)/v1")[1]
    cluster.read_until(rf"curl {url}/v1/chat/completions")
    cluster.read_until(rf"pdserve chat --base-url {url}")
    cluster.read_until(re.escape(f"Logs: {workdir / 'logs'}"))
    children = cluster.children()
    assert len(children) == 5
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.finish() == 0
    stopped = [re.sub(r"-\d", "", name) for name in re.findall(r"  (\S+) stopped", cluster.output)]
    assert stopped == ["router", *stopped[1:4], "redis"]
    assert sorted(stopped[1:4]) == ["decode", "decode", "prefill"]
    assert gone(children)
    assert {path.name for path in (workdir / "logs").iterdir()} >= {
        "router.log",
        "prefill-0.log",
        "decode-0.log",
        "decode-1.log",
        "redis.log",
    }
    assert not list(workdir.glob("pdserve-*")), "the private directory of the run is left behind"


def test_sigterm_drains_too(up: Callable[..., Up]) -> None:
    cluster = up()
    cluster.read_until("Ctrl-C drains")
    cluster.process.terminate()
    assert cluster.finish() == 0
    assert "router stopped" in cluster.output


def test_a_second_ctrl_c_does_not_wait(up: Callable[..., Up], workdir: Path) -> None:
    set_steps(workdir, "router_svc", "ignore-sigterm", "notify=READY=1", "forever")
    cluster = up("--drain-timeout-s", "3600")
    cluster.read_until("Ctrl-C drains")
    children = cluster.children()
    cluster.process.send_signal(signal.SIGINT)
    cluster.read_until("router is draining")
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.finish() == 0
    assert "Stopping at once" in cluster.output
    assert gone(children)


def test_ctrl_c_during_the_start_ends_everything(up: Callable[..., Up], workdir: Path) -> None:
    set_steps(workdir, "decode_svc", "notify=STATUS=loading for long", "forever")
    cluster = up()
    cluster.read_until("decode-0: loading for long")
    children = cluster.children()
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.finish() == 0
    assert "before the cluster was ready" in cluster.output
    assert gone(children)


def test_kill_9_leaves_no_process_behind(up: Callable[..., Up]) -> None:
    cluster = up()
    cluster.read_until("Ctrl-C drains")
    children = cluster.children()
    assert len(children) == 4
    cluster.process.kill()
    assert gone(children)


@pytest.mark.parametrize("name", ["redis", "decode-0", "prefill-0", "router"])
def test_a_process_that_dies_is_restarted_and_reported_in_one_line(
    up: Callable[..., Up], workdir: Path, name: str
) -> None:
    cluster = up()
    cluster.read_until("Ctrl-C drains")
    word = find_redis_server().name if name == "redis" else f"--worker-id={name}" if "-" in name else "router_svc"
    [victim] = [pid for pid in cluster.children() if word in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(victim, signal.SIGKILL)
    log = re.escape(str(workdir / "logs" / f"{name}.log"))
    cluster.read_until(rf"{name} was killed by SIGKILL after [\d.]+ s; starting it again now\. Log: {log}\n")
    cluster.read_until(rf"{name} is ready again")
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.finish() == 0


def test_a_setup_error_of_a_worker_is_the_only_error_shown(up: Callable[..., Up], workdir: Path) -> None:
    set_steps(workdir, "decode_svc", "notify=STATUS=error: No room for one block.", "print=error: No room.", "exit=1")
    cluster = up()
    assert cluster.finish() == 1
    assert cluster.output.splitlines()[-1] == "error: No room for one block."
    assert cluster.output.count("error:") == 1
    assert "draining" not in cluster.output


def test_a_taken_port_is_reported_before_anything_starts(up: Callable[..., Up]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        cluster = up("--port", str(port))
        assert cluster.finish() == 1
    assert cluster.output == (
        f"error: Cannot listen on 127.0.0.1:{port}: Address already in use. Choose another with --port or --host.\n"
    )


def test_a_wrong_model_path_is_reported_in_one_line(up: Callable[..., Up], workdir: Path) -> None:
    (workdir / "tiny" / "config.json").unlink()
    cluster = up()
    assert cluster.finish() == 1
    assert "error: " in cluster.output.splitlines()[-1]
    assert "is not a model directory: it has no config.json" in cluster.output.splitlines()[-1]


def test_a_log_directory_that_cannot_be_made_is_reported_in_one_line(up: Callable[..., Up], workdir: Path) -> None:
    (workdir / "logs").write_text("a file")
    cluster = up()
    assert cluster.finish() == 1
    assert "Choose one with --log-dir" in cluster.output


def test_an_unreachable_redis_is_reported_in_one_line_without_its_password(up: Callable[..., Up]) -> None:
    cluster = up("--redis-url", f"redis://:hush@127.0.0.1:{free_port()}")
    assert cluster.finish() == 1
    assert "does not answer. Start it, correct --redis-url" in cluster.output
    assert "hush" not in cluster.output


def test_the_console_shows_warnings_of_a_process_but_not_its_info_lines(up: Callable[..., Up], workdir: Path) -> None:
    timestamp = "2026-01-02T03:04:05.678Z"
    set_steps(
        workdir,
        "decode_svc",
        f"print={timestamp} INFO    decode_svc a all_is_well",
        f"print={timestamp} WARNING decode_svc a redis_lost since=3",
        "until-sigterm",
    )
    cluster = up()
    cluster.read_until("decode-0 warning: decode_svc a redis_lost since=3")
    cluster.read_until("Ctrl-C drains")
    assert "all_is_well" not in cluster.output
    assert "all_is_well" in (workdir / "logs" / "decode-0.log").read_text()


def test_without_prefill_the_decode_worker_gets_all_cores(up: Callable[..., Up]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    cluster = up("--prefill", "0")
    cluster.read_until("Ctrl-C drains")
    assert "prefill-0" not in cluster.output
    plural = "s" if len(cores) != 1 else ""
    assert f"decode-0: {len(cores)} thread{plural} on core{plural} {','.join(map(str, cores))}," in cluster.output


def test_with_one_gpu_there_is_no_prefill_worker_and_a_line_says_so(
    up: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cluster = up("--device", "cuda")
    cluster.read_until("decode-0: starting")
    assert "One GPU: no prefill worker" in cluster.output
    assert "prefill-0" not in cluster.output


def test_several_models_have_workers_each_and_are_named(up: Callable[..., Up], workdir: Path) -> None:
    shutil.copytree(workdir / "tiny", workdir / "second")
    cluster = up("--decode", "1", str(workdir / "second"), "--alias", "gpt-4o=second")
    cluster.read_until("Ctrl-C drains")
    assert "Models: tiny, second\n" in cluster.output
    for name in ("prefill-0 (tiny)", "prefill-1 (second)", "decode-0 (tiny)", "decode-1 (second)"):
        assert f"  {name}: " in cluster.output
    assert len(cluster.children()) == 6


def test_an_alias_of_no_model_is_reported_in_one_line(up: Callable[..., Up]) -> None:
    cluster = up("--alias", "gpt-4o=other")
    assert cluster.finish() == 1
    assert "error: --alias gpt-4o=other: there is no model 'other'. The models are: tiny." in cluster.output
