"""The fork server's process: imports modules and makes calls, then forks a service for each request of the supervisor.

    python -m pdserve.cli.supervisor.forking FD MODULES PADDING

Importing takes most of the time in which a service starts. A forked one has everything imported, and what the calls
have left in caches. It shares the memory of both, and is otherwise as if it had been executed: a session, an
environment, arguments, output and a parent of its own. One that has opened a GPU forks nothing: see
`pdserve.base.gpu_files`.

    supervisor -> fork server -> (ends at once) -> service

The supervisor's first message has the calls, as JSON: [[module, function, argument], ...].

The process in between ends, so that the service becomes a child of the supervisor, which is its subreaper meanwhile.
The supervisor reaps it, and the kernel kills it when the supervisor dies, as with `launch`. The death of the fork
server harms no service.

Sources: prctl(2), PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER; proc(5), cmdline.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass

from pdserve.base.collector import importing
from pdserve.base.gpu_files import opened_gpu_files

_PR_SET_PDEATHSIG = 1
#: Bytes of a request, at most: arguments and environment.
MAX_REQUEST_BYTES = 128 * 1024
#: Arguments of the fork server are overwritten with those of the service, for ps(1); this is room for long ones.
PADDING = "." * 2048


@dataclass(frozen=True, slots=True)
class _Service:
    """What a forked process is to become: `argv` has a module with a function `main`, or a package, behind `-m`."""

    argv: list[str]
    environment: dict[str, str]


def main() -> None:
    """Forks until the supervisor closes its end. In the forked process, runs the service."""
    control = socket.socket(fileno=int(sys.argv[1]))
    supervisor, given = os.getppid(), set(os.environ)  # noqa: TID251
    with importing():
        for name in sys.argv[2].split(","):
            importlib.import_module(name)
        control.send(b"imported")
        if not (calls := control.recv(MAX_REQUEST_BYTES)):
            return
        for module, function, argument in json.loads(calls):
            _call(module, function, argument)
    if opened := opened_gpu_files():
        print(f"Services are executed, not forked: an import, or a call, has opened {', '.join(opened)}.", flush=True)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(b"ready")
    # Libraries set variables when they are imported, for what they load later.
    added = {name: value for name, value in os.environ.items() if name not in given}  # noqa: TID251
    service = _serve(control, supervisor, added)
    if service is None:
        return
    control.close()
    sys.argv = service.argv[service.argv.index("-m") + 1 :]
    main_module = importlib.import_module(sys.argv[0])
    if hasattr(main_module, "__path__"):
        main_module = importlib.import_module(f"{sys.argv[0]}.__main__")
    main_module.main()


def _call(module: str, function: str, argument: str) -> None:
    """Logs an error: the service makes the same call, and reports it."""
    try:
        getattr(importlib.import_module(module), function)(argument)
    except Exception:  # noqa: BLE001
        traceback.print_exc()


def _serve(control: socket.socket, supervisor: int, added: dict[str, str]) -> _Service | None:
    """Returns None at the end, and what to run in each forked process. `added`: to the environment of each."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        if not data:
            return None
        service = json.loads(data)
        request = _Service(argv=service["argv"], environment={**added, **service["environment"]})
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(reading)
            _become_service(writing, supervisor, descriptors[0], request)
            return request
        for descriptor in (writing, *descriptors):
            os.close(descriptor)
        with os.fdopen(reading, "rb") as pipe:
            pid = pipe.read()
        os.waitpid(between, 0)
        control.send(pid)


def _become_service(writing: int, supervisor: int, output: int, request: _Service) -> None:
    """Forks once more and returns in that process, with the supervisor as its parent. Never returns in this one."""
    reading_session, writing_session = os.pipe()
    orphaned = {signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, orphaned)
    pid = os.fork()
    if pid:
        os.close(writing_session)
        os.read(reading_session, 1)
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)
    os.setsid()
    os.write(writing_session, b".")
    # The kernel sends it once the process in between has ended and this one has its new parent.
    signal.sigwait(orphaned)
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)
    for descriptor in (reading_session, writing_session):
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()  # noqa: TID251 - nothing is read
    os.environ.update(request.environment)  # noqa: TID251
    _show_arguments(request.argv)


def _show_arguments(argv: list[str]) -> None:
    """Overwrites the arguments that other processes see, as far as there is room."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
    shown = b"\0".join(os.fsencode(argument) for argument in argv)[: max(0, end - start - 1)]
    if start:  # 0: the kernel does not show it
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
