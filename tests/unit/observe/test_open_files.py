"""What a process does that runs out of open files."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pdserve.observe import open_files

WAIT_S = 60.0
#: A service with few files, which strangers take all of. It prints what became of it.
_SERVICE = """
    import asyncio, resource, socket, sys
    from aiohttp import web
    from pdserve.base import logs
    from pdserve.observe import open_files
    from pdserve.net.admin import bound_socket, serve_http
    from pdserve.net.service import _main
    from pdserve.net.stream_server import serve_streams
    from pdserve.v1 import decode_pb2 as pb

    turns = 0
    run_once = asyncio.BaseEventLoop._run_once

    def counted(loop):
        global turns
        turns += 1
        run_once(loop)

    asyncio.BaseEventLoop._run_once = counted

    async def handle(stream):
        await stream.read()
        await stream.write(pb.DecodeResponse(ended=pb.DecodeEnded()))

    async def serve():
        listener = bound_socket("127.0.0.1", 0, flag="--stream-port")
        http = bound_socket("127.0.0.1", 0, flag="--port")
        ports = listener.getsockname()[1], http.getsockname()[1]
        async with (
            serve_streams(listener, pb.DecodeRequest.FromString, handle, lambda error: pb.DecodeResponse()),
            serve_http(web.Application(), http, grace_s=0.1),
        ):
            loop, taken = asyncio.get_running_loop(), asyncio.Event()
            end = loop.run_in_executor(None, sys.stdin.read)  # Later, there may be no file left to start a thread with.
            print(*ports, flush=True)
            handler, before = loop.get_exception_handler(), turns

            def seen(loop, context):
                handler(loop, context)
                if "socket" in context:
                    exhausted.add(context["socket"].fileno())
                    taken.set()

            exhausted = set()
            loop.set_exception_handler(seen)
            while len(exhausted) < 2:
                taken.clear()
                await taken.wait()
            print("exhausted", flush=True)
            await asyncio.sleep(1.5)
            spun = turns - before
            print("turns", spun, flush=True)
            await end

    logs.configure("test", "info", "text")
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    asyncio.run(_main(serve()))
"""


def test_a_process_without_free_files_does_not_spin_and_serves_again_when_some_are_free(tmp_path: Path) -> None:
    """asyncio logs a hundred tracebacks a second for each listener."""
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_SERVICE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as service,
    ):
        try:
            assert service.stdout is not None
            ports = [int(port) for port in service.stdout.readline().split()]
            assert len(ports) == 2, log.read_text()
            assert is_served(*ports)
            strangers = [socket.create_connection(("127.0.0.1", port)) for port in ports * 60]
            assert service.stdout.readline() == "exhausted\n"
            turns = int(service.stdout.readline().split()[1])
            for each in strangers:
                each.close()
            assert is_served(*ports)
            service.communicate(timeout=WAIT_S)
            assert service.returncode == 0, log.read_text()
        finally:
            service.kill()
    errors = log.read_text()
    assert turns < 2000
    assert errors.count("cannot_accept_connections") == 1
    assert "max_open_files=40" in errors
    assert "Traceback" not in errors


def is_served(streams: int, http: int) -> bool:
    """Whether both ports answer: to an empty message, and to a request."""
    answers = []
    for port, request in ((streams, bytes(4)), (http, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")):
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
            connection.sendall(request)
            answers.append(connection.recv(4))
    return all(answers)


def test_the_soft_limit_is_raised_and_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 524_288), (256, 4096), (1_048_576, 1_048_576), (1024, resource.RLIM_INFINITY)]
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    changes: list[tuple[int, int] | None] = []
    for limit in limits:
        changes.append(None)
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: limit)
        monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: changes.__setitem__(-1, wanted))
        open_files.raise_limit()
    assert changes == [(65_536, 524_288), (4096, 4096), None, (65_536, resource.RLIM_INFINITY), None]


async def test_a_listener_that_was_closed_while_it_could_not_accept_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio has it listen again after a second, whether or not it is still open."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(open_files.AcceptErrors())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
    loop.call_soon(loop._start_serving, asyncio.Protocol, listener)  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not caplog.records
    loop.call_soon(int, "no number")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [record.name for record in caplog.records] == ["asyncio"]


def run_alone(script: str) -> None:
    """Runs it in a process of its own, whose limit it may lower."""
    header = """
        import itertools, os, resource
        from pdserve.observe.open_files import SpareFiles

        def num_open():
            return len(os.listdir("/proc/self/fd")) - 1  # Without that of the listing.

        def opened(number):
            return [os.open(os.devnull, os.O_RDONLY) for _ in range(number)]

        def limit(number):
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(header + script)], check=True, timeout=WAIT_S)


def test_kept_files_are_free_for_the_next_call_when_no_other_is() -> None:
    run_alone("""
        files = SpareFiles(kept=6, needed=3, clock=itertools.count().__next__)
        assert files.can_open()
        limit(num_open())
        assert files.can_open()
        taken = opened(3)
        assert files.can_open()
        taken += opened(3)
        assert not files.can_open()
        for each in taken[:3]:
            os.close(each)
        assert files.can_open()
        opened(3)
        files.close()
        opened(1)
    """)


def test_a_single_free_file_is_not_taken_for_as_many_as_a_call_needs() -> None:
    run_alone("""
        files = SpareFiles(kept=6, needed=3, clock=itertools.count().__next__)
        assert files.can_open()
        limit(num_open() + 1)
        assert files.can_open()
        opened(3)
    """)


def test_few_free_files_far_below_the_limit_are_not_taken_for_many() -> None:
    """Descriptors are given out from the lowest: after all were in use, a low free one says nothing of the others."""
    run_alone("""
        limit(512)
        files = SpareFiles(kept=6, needed=3, clock=itertools.count().__next__)
        assert files.can_open()
        taken = []
        try:
            while True:
                taken += opened(1)
        except OSError:
            pass
        os.close(taken[0])
        assert files.can_open()
        opened(3)
    """)
