"""Console output of `pdserve up`: one line per event, and during the start the status of each process."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.byte_sizes import binary_size
from pdserve.cli.log_watch import LineBudget
from pdserve.cli.placement import CoreShare, GpuShare
from pdserve.cli.supervisor.spec import (
    BecameReady,
    Died,
    ProcessEvent,
    ProcessStarted,
    StatusChanged,
    Stopped,
    Stopping,
)
from pdserve.net import notify


class UpConsole:
    """Prints to a terminal, or plain lines to a file or pipe. A closed terminal is no error."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._doing: dict[str, str] = {}
        self._live: Live | None = None
        self._starting = False
        self._budget = LineBudget()
        #: Set to ignore events from then on.
        self.quiet = False

    def say(self, text: str, style: str = "") -> None:
        """Prints one line."""
        with suppress(OSError):
            self._console.print(Text(text, style=style), soft_wrap=True)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Shows `doing` and the status of processes while the block runs; on a terminal in a live table."""
        self._starting = True
        try:
            if not self._console.is_terminal:
                yield
                return
            with Live(self._table(), console=self._console, auto_refresh=False, transient=True) as self._live:
                yield
        finally:
            self._live = None
            self._starting = False

    def doing(self, name: str, text: str | None) -> None:
        """Sets the current activity of `name`; None: it is done. A supervisor of this process is sent it, too."""
        if self._doing.get(name) == text:
            return
        if text is not None and self._starting:
            notify.status(f"{name}: {text}")
        if text is None:
            self._doing.pop(name, None)
        else:
            self._doing[name] = text
        if self._live is not None:
            with suppress(OSError):
                self._live.update(self._table(), refresh=True)
        elif text is not None and self._starting:
            self.say(f"  {name}: {text}")

    def on_event(self, event: ProcessEvent) -> None:
        """Shows an event of the supervisor."""
        if self.quiet:
            return
        name = event.spec.name
        match event:
            case ProcessStarted():
                self.doing(name, "starting")
            case StatusChanged(text=text):
                # An error is shown with the exit that follows; readiness has its own event.
                if name in self._doing and not text.startswith("error:") and text != "ready":
                    self.doing(name, text)
            case BecameReady(took_s=took_s, is_restart=is_restart):
                self.doing(name, None)
                again = " again" if is_restart else ""
                self.say(f"  {name} is ready{again} after {took_s:.1f} s", "green" if is_restart else "")
            case Died():
                self.doing(name, None)
                self.say(died_line(event), "red")
            case Stopping():
                self.say(f"  {name} is draining")
            case Stopped(exit=end, forced=forced):
                self.doing(name, None)
                how = "was killed" if forced else "stopped" if end.code == 0 else end.describe()
                self.say(f"  {name} {how}", "" if end.code == 0 or forced else "yellow")

    def on_log(self, name: str, text: str) -> None:
        """Shows a warning or an error that a process logged, unless it logs too many."""
        left = self._budget.left(name, time.monotonic())
        if left:
            more = "  (more in its log)" if left == 1 else ""
            self.say(f"{name} {text}{more}", "yellow" if text.startswith("warning") else "red")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, text in self._doing.items():
            table.add_row(Text(f"  {name}", style="cyan"), Text(text, style="dim"))
        return table


def died_line(event: Died) -> str:
    """One line: how the process died, its reason if it gave one, when it is restarted, and its log."""
    end = event.exit
    why = f" ({end.reason.removeprefix('error:').strip()})" if end.reason.startswith("error:") else ""
    when = f"in {event.restart_in_s:g} s" if event.restart_in_s else "now"
    return (
        f"{event.spec.name} {end.describe()} after {end.ran_s:.1f} s{why}; "
        f"starting it again {when}. Log: {event.spec.log_path}"
    )


def describe_share(share: CoreShare) -> str:
    """Formats a share, such as `2 threads on cores 0,1, and on core 2 when idle` or `1 thread on any core`."""
    threads = f"{share.threads} thread{'s' if share.threads != 1 else ''}"
    if not share.cpus:
        return f"{threads} on any core"
    borrowed = f", and on {_cores(share.borrow_cpus)} when idle" if share.borrow_cpus else ""
    return f"{threads} on {_cores(share.cpus)}{borrowed}"


def _cores(cpus: Sequence[int]) -> str:
    return f"core{'s' if len(cpus) != 1 else ''} {','.join(map(str, cpus))}"


def describe_plan(
    names: Sequence[str], shares: Sequence[CoreShare], gpus: Sequence[GpuShare], kv_cache_bytes: int | None
) -> list[str]:
    """One line per worker: its cores or GPU, and its KV cache."""
    if gpus:
        cache = "" if kv_cache_bytes is None else f", {binary_size(kv_cache_bytes)} of KV cache"
        return [f"  {name}: {gpu}{cache}" for name, gpu in zip(names, gpus, strict=True)]
    assert kv_cache_bytes is not None
    return [
        f"  {name}: {describe_share(share)}, {binary_size(kv_cache_bytes)} of KV cache"
        for name, share in zip(names, shares, strict=True)
    ]


def describe_ready(
    *,
    base_url: str,
    grpc_address: str,
    served_names: Sequence[str],
    log_dir: Path,
    took_s: float,
    console_url: str | None,
) -> str:
    """Text for the user: addresses, models if there are several, commands to paste, and where the logs are."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": served_names[0], "messages": [question], "temperature": 0, "max_tokens": 64})
    chat = "pdserve chat" if base_url == "http://127.0.0.1:8000" else f"pdserve chat --base-url {base_url}"
    console = f"Console: {console_url}/console\n" if console_url else ""
    models = f"Models: {', '.join(served_names)}\n" if len(served_names) > 1 else ""
    apis = f"OpenAI-compatible API: {base_url}/v1   gRPC: {grpc_address}"
    return (
        f"\nReady after {took_s:.1f} s. {apis}\n{models}{console}\n"
        f"  curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
        f"  {chat}\n\n"
        f"Logs: {log_dir}\nCtrl-C drains and stops; a second Ctrl-C stops at once."
    )


def reachable_host(host: str) -> str:
    """The address at which clients on this machine reach the listening address `host`."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
