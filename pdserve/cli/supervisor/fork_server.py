"""The supervisor's end of the fork server, which starts services whose imports are done already."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.base.logs import get_logger
from pdserve.cli.supervisor.forking import MAX_REQUEST_BYTES, PADDING
from pdserve.cli.supervisor.start import launch_argv

log = get_logger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
#: A fork takes some ms. A server that needs longer is killed, and services are executed.
_FORK_TIMEOUT_S = 5.0
#: Calls before the first fork take a second. A server that needs much longer is given up.
_PREPARE_TIMEOUT_S = 60.0
#: Between the end of a fork server and the start of the next one.
_RESTART_S = 1.0


class ForkedProcess:
    """A process that the fork server has started, a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Reaps it. Returns the exit status, or minus the signal's number."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """Sends SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A process that has imported `modules`, and made the calls of `prepare`.

    `run` keeps one running; while there is none, services are executed.
    """

    def __init__(
        self, python: Sequence[str], modules: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        """`python`: the interpreter with its flags. `environment` of the imports; services have their own."""
        self._argv = (*python, "-m", "pdserve.cli.supervisor.forking")
        self._modules = modules
        self._environment = environment
        self._log_path = log_path
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: The calls as the server reads them, once they are known.
        self._calls: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        #: Set once the first server is ready, or cannot be.
        self.settled = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The server's process id; None: there is none that is ready."""
        return None if self._process is None or self._control is None else self._process.pid

    def prepare(self, calls: Sequence[tuple[str, str, str]]) -> None:
        """Sets what each server calls before its first fork: modules, functions and an argument for each.

        To be called once. No server is ready before.
        """
        self._calls.set_result(json.dumps(calls).encode())

    async def run(self) -> None:
        """Runs until cancelled, or until a server cannot become ready: then services are executed from now on."""
        was_ready = True
        try:
            while was_ready:
                was_ready = await self._run_once()
                await asyncio.sleep(_RESTART_S if was_ready else 0)
        except OSError as error:
            log.warning("no_fork_server", reason=error)
        finally:
            self.settled.set()

    def fork(self, argv: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
        """Starts what `argv` executes. None: it has to be executed.

        `argv` names a module behind `-m`; `output` is the descriptor of stdout and stderr.
        """
        if self._control is None:
            return None
        request = json.dumps({"argv": list(argv), "environment": dict(environment)}).encode()
        if len(request) > MAX_REQUEST_BYTES:
            return None
        _be_subreaper(True)
        try:
            socket.send_fds(self._control, [request], [output])
            pid = int(self._control.recv(64))
        except (OSError, ValueError):  # It has ended, or hangs: `_run_once` sees the end.
            assert self._process is not None
            self._process.kill()
            self._control = None
            return None
        finally:
            _be_subreaper(False)
        return ForkedProcess(pid)

    async def _run_once(self) -> bool:
        """Runs one server from start to end. Returns whether another one could be ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            with theirs:
                process = self._process = self._start(theirs.fileno())
            stack.callback(process.wait)
            stack.callback(process.kill)
            ours.setblocking(False)
            if not await asyncio.get_running_loop().sock_recv(ours, 64):
                return False  # It could not import: services that are executed say why.
            if not await _finishes_before_end(self._calls, process.pid):
                return True  # It was killed while the calls were not known.
            if not await self._prepared(ours):
                return False
            ours.settimeout(_FORK_TIMEOUT_S)
            self._control = ours
            self.settled.set()
            try:
                await _ended(process.pid)
            finally:
                self._control = None
            return True

    async def _prepared(self, control: socket.socket) -> bool:
        """Whether the server has made the calls. If not, they may end the next one, too."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_PREPARE_TIMEOUT_S):
                await loop.sock_sendall(control, await self._calls)
                if await loop.sock_recv(control, 64):
                    return True
                reason: object = f"it has ended; {self._log_path} says why"
        except OSError as error:
            reason = error
        except TimeoutError:
            reason = "its calls take too long"
        log.warning("fork_server_given_up", reason=reason)
        return False

    def _start(self, control: int) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab", buffering=0) as log:
            return subprocess.Popen(
                launch_argv([*self._argv, str(control), ",".join(self._modules), PADDING]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=(control,),
                start_new_session=True,
            )


async def _finishes_before_end(future: asyncio.Future[bytes], pid: int) -> bool:
    """Whether the future is done before the process ends."""
    ending = asyncio.ensure_future(_ended(pid))
    try:
        await asyncio.wait((future, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
    return future.done()


async def _ended(pid: int) -> None:
    """Returns when the process has ended. It stays a zombie."""
    descriptor, ended, loop = os.pidfd_open(pid), asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _be_subreaper(enabled: bool) -> None:
    """Only meanwhile: other orphans go to init, as they always do."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)
