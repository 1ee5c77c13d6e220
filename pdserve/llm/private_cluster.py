"""A cluster on this machine that belongs to an `LLM`: `pdserve up` as a child that never outlives this process.

The child watches this process (`owned_up`), so that it also ends after SIGKILL; its own processes end with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from pdserve.base.api_key import KEY_VARIABLE
from pdserve.base.config import child_environment, default_of, option_spec
from pdserve.base.errors import SetupError
from pdserve.cli.free_ports import free_ports
from pdserve.cli.interpreter import python_flags
from pdserve.cli.run_dir import log_directory
from pdserve.cli.stop_signals import finished_before
from pdserve.cli.supervisor.child import Child
from pdserve.cli.supervisor.spec import ProcessSpec
from pdserve.cli.up_config import UpConfig
from pdserve.cli.vllm_flags import FLAGS

_NAME = "pdserve up"
#: From SIGTERM to SIGKILL. Requests have ended by then, so there is nothing to wait for but the processes.
_STOP_GRACE_S = 30.0
#: What the cluster's owner decides.
_OWN_FLAGS = ("host", "port", "grpc_port", "admin_port", "api_key", "api_keys_file", "ssl_certfile", "ssl_keyfile")
_DEFAULTS: Mapping[str, object] = {"console": False, "drain_timeout_s": 5}


def up_arguments(model: str, options: Mapping[str, object]) -> list[str]:
    """The command line of `pdserve up` for options of Python, such as `max_model_len=4096`.

    Raises `TypeError` for an option that `pdserve up` does not know.
    """
    fields = {field.name: option_spec(field) for field in dataclasses.fields(UpConfig)}
    known = fields.keys() - {"model", *_OWN_FLAGS}
    of_vllm = {flag.removeprefix("--").replace("-", "_") for flag in FLAGS if flag.startswith("--")} - {"model", "seed"}
    arguments = [model]
    for name, value in {**_DEFAULTS, **options}.items():
        if name not in known | of_vllm:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " Options are the flags of `pdserve up`."
            raise TypeError(f"LLM() has no option {name!r}.{hint}")
        if isinstance(value, list | tuple) and name in fields and fields[name].repeated:
            arguments += [word for each in value for word in _flag(name.replace("_", "-"), each)]
        else:
            arguments += _flag(name.replace("_", "-"), value)
    return arguments


def _flag(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{name}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


class PrivateCluster:
    """A router on a free port of this machine, with a key that only this process has, and its workers."""

    def __init__(self, model: str, options: Mapping[str, object]) -> None:
        """`options`: flags of `pdserve up`. Raises `TypeError` for an unknown one."""
        self._arguments = up_arguments(model, options)
        self._log_dir = options.get("log_dir")
        self.api_key = secrets.token_urlsafe(24)
        self.base_url = ""
        self._owner = os.getpid()
        self._child: Child | None = None
        self._stack = ExitStack()

    async def start(self, on_status: Callable[[str], None]) -> None:
        """Returns when it is ready. Calls back with what it does meanwhile. Raises `SetupError`."""
        port, grpc_port = free_ports(2)
        self.base_url = f"http://127.0.0.1:{port}"
        chosen = None if self._log_dir is None else str(self._log_dir)
        log_dir = self._stack.enter_context(log_directory(chosen, max_runs=default_of(UpConfig, "log_max_runs")))
        flags = ("--host", "127.0.0.1", "--port", str(port), "--grpc-port", str(grpc_port), "--log-dir", str(log_dir))
        command = (sys.executable, *python_flags(), "-m", "pdserve.llm.owned_up", str(self._owner))
        spec = ProcessSpec(
            name=_NAME,
            argv=(*command, *self._arguments, *flags),
            environment=child_environment(**{KEY_VARIABLE: self.api_key}),
            log_path=log_dir / "up.log",
        )
        child = self._child = Child(spec, on_status, _start_detached)
        try:
            if not await finished_before(child.ended, child.said_ready.wait()):
                end = child.exit()
                reason = end.reason.removeprefix("error:").strip() or end.describe()
                raise SetupError(f"The cluster did not start: {reason} Logs: {log_dir}")
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends all of its processes, and returns when they have ended. Idempotent."""
        child = self._child
        if child is not None and not child.ended.is_set():
            child.terminate()
            try:
                async with asyncio.timeout(_STOP_GRACE_S):
                    await child.ended.wait()
            except TimeoutError:
                child.kill()
                await child.ended.wait()
        self._stack.close()

    def abandon(self) -> None:
        """Has its processes end soon, from any thread and without an event loop. Idempotent.

        Does nothing in a process that was forked: they are not its children.
        """
        if self._child is not None and os.getpid() == self._owner:
            self._child.terminate()


def _start_detached(spec: ProcessSpec, environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Starts it without a tie to this thread, which may end before the process does."""
    argv: Sequence[str] = spec.argv
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
