"""Servers are started, measured, and stopped in every case."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.peers.environments import PeerUnavailable
from benchmarks.peers.load import WORKLOADS, Sizes
from benchmarks.peers.resources import PeakMemory, tree
from benchmarks.peers.rows import MEASURES
from benchmarks.peers.servers import started
from benchmarks.peers.systems import System
from pdserve.cli.bench.workload import Target
from tests.unit.cli.bench.fake_server import FakeServer, running

#: A server that answers every request, and has a child that gets no signal to stop.
_ANSWERING = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"])); self.do_GET()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_TINY = Sizes(
    repeats=1,
    num_streams=3,
    prompt_tokens=4,
    output_tokens=3,
    long_prompt_tokens=9,
    prefill_tokens=8,
    prefix_tokens=5,
    num_running=2,
    running_output_tokens=4,
    num_arriving=2,
    first_arrival_s=0.0,
    arrivals_per_s=1000.0,
)


def _system(code: str) -> System:
    return System(key="fake", label="fake", arguments=lambda port: [sys.executable, "-c", code, str(port)])


def test_nothing_of_a_server_is_left_after_an_error(tmp_path: Path) -> None:
    everyone: list[psutil.Process] = []

    def fail() -> None:
        with started(_system(_ANSWERING), tmp_path) as starting:
            assert starting.wait_ready().start_s > 0
            everyone.extend(tree(starting.process.pid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert len(everyone) == 2
    assert not any(process.is_running() for process in everyone)


def test_a_server_that_ends_at_once_is_reported_with_its_last_line(tmp_path: Path) -> None:
    refusing = _system("raise SystemExit('no such flag')")
    with pytest.raises(PeerUnavailable, match="no such flag"), started(refusing, tmp_path) as starting:
        starting.wait_ready()


def test_children_of_a_server_that_died_are_stopped_too(tmp_path: Path) -> None:
    with started(_system(_ANSWERING), tmp_path) as starting:
        starting.wait_ready()
        [parent, child] = tree(starting.process.pid)
        parent.kill()
        starting.process.wait()
        assert child.is_running()
    assert not psutil.wait_procs([child], timeout=30)[1]


def test_a_missing_program_makes_the_peer_unavailable(tmp_path: Path) -> None:
    absent = System(key="absent", label="absent", arguments=lambda _: [str(tmp_path / "absent")])
    with pytest.raises(PeerUnavailable, match="No such file"), started(absent, tmp_path):
        pass


def test_workloads_return_the_measures_that_the_rows_need() -> None:
    with running(FakeServer()) as server:
        target = Target(base_url=server.base_url, model="tiny")
        for name, workload in WORKLOADS.items():
            samples = asyncio.run(workload(target, _TINY, 7))
            expected = {key for key, measure in MEASURES.items() if measure.workload == name} - {"read_gb_per_s"}
            assert set(samples) == expected
            assert all(value >= 0 for values in samples.values() for value in values)
    prompts = [tuple(body["prompt"]) for body in server.bodies]  # type: ignore[arg-type]
    assert len(set(prompts)) == len(prompts)


def test_a_failed_request_leaves_no_figure() -> None:
    with running(FakeServer(reply=lambda _: (503, {"error": {"message": "too busy"}}))) as server:
        target = Target(base_url=server.base_url, model="tiny")
        with pytest.raises(PeerUnavailable, match="too busy"):
            asyncio.run(WORKLOADS["burst"](target, _TINY, 7))


def test_peak_memory_counts_children_and_remembers(tmp_path: Path) -> None:
    memory = PeakMemory()
    with started(_system(_ANSWERING), tmp_path) as starting:
        starting.wait_ready()
        with memory.watching(starting.process.pid):
            pass
        [parent, child] = tree(starting.process.pid)
        assert memory.peak_bytes > max(parent.memory_full_info().uss, child.memory_full_info().uss)
