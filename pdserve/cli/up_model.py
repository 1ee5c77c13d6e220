"""Runs `prepare` in a process of its own, reports its progress and returns its result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.cli.cluster_plan import PreparedModel
from pdserve.cli.supervisor.start import launch_argv

_MIB = 1024**2


async def prepare_model(
    command: Sequence[str], *, environment: Mapping[str, str], log_path: Path, on_progress: Callable[[str], None]
) -> PreparedModel:
    """Runs `command`, which prints the messages of `prepare`. Raises `SetupError` with its one-line error.

    Cancellation kills the command and its children.
    """
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *launch_argv(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    assert process.stdout is not None
    prepared = None
    try:
        async for line in process.stdout:
            message = json.loads(line)
            if "error" in message:
                raise SetupError(message["error"])
            if "path" in message:
                prepared = PreparedModel(path=Path(message["path"]), served_name=message["served_name"])
            else:
                on_progress(describe_progress(message["doing"], message["done_bytes"], message["total_bytes"]))
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if prepared is None:
        raise SetupError(f"Preparing the model ended with exit code {code}. Log: {log_path}")
    return prepared


def prepare_command(model: str, cache_dir: str | None, python_flags: Sequence[str]) -> list[str]:
    """The command line of `prepare`."""
    arguments = [model] if cache_dir is None else [model, cache_dir]
    return [sys.executable, *python_flags, "-m", "pdserve.cli.prepare", *arguments]


def describe_progress(what: str, done_bytes: int, total_bytes: int | None) -> str:
    """Formats progress, such as `Downloading X: 12 of 93 MiB (13%)`; `total_bytes` may be unknown."""
    if total_bytes:
        share = min(1.0, done_bytes / total_bytes)
        return f"{what}: {done_bytes / _MIB:.0f} of {total_bytes / _MIB:.0f} MiB ({share:.0%})"
    return f"{what}: {done_bytes / _MIB:.0f} MiB" if done_bytes else what
