"""The Redis servers that persist, by the commands of the compose file and of Kubernetes: they lose and drop nothing.

Both keep responses in a store of their own. That of the compose file which all services share keeps usage and budgets.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pdserve.base.errors import StoreError
from pdserve.cli.private_redis import wait_until_ready
from pdserve.redis.store import Store, as_bytes
from tests.deploy.compose_files import BASE, load
from tests.deploy.pods import container_of
from tests.support.redis_processes import path_with_redis_server

PASSWORD = "a-password"
KEY, RECORD = "pdstate:response:t:resp_1", b"a response"


def _compose_script(memory: str) -> str:
    variables = {"PDSERVE_STATE_MEMORY": memory}
    script: str = load(BASE, variables=variables)["services"]["state"]["command"][2]
    return script.replace("$$", "$").replace("/secrets/state/", "/SECRETS/")


def _compose_redis_script(memory: str) -> str:
    script: str = load(BASE)["services"]["redis"]["command"][2]
    changed = script.replace("--maxmemory 192mb", f"--maxmemory {memory}")
    assert changed != script
    return changed.replace("$$", "$").replace("/secrets/redis/redis-password", "/SECRETS/state-password")


def _kubernetes_script(memory: str) -> str:
    script: str = container_of("base", "state")["command"][2]
    changed = script.replace("--maxmemory 512mb", f"--maxmemory {memory}")
    assert changed != script
    return changed.replace("/run/secrets/pdserve-state/", "/SECRETS/")


SCRIPTS = [
    pytest.param(_compose_script, id="compose"),
    pytest.param(_compose_redis_script, id="compose-redis"),
    pytest.param(_kubernetes_script, id="kubernetes"),
]
Start = Callable[[], AbstractAsyncContextManager[Store]]


@pytest.fixture(params=SCRIPTS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Runs the command on a volume that stays, until the block ends, with 4 MB; then kills it."""
    (tmp_path / "data").mkdir()
    password_file = tmp_path / "state-password"
    password_file.write_text(f"{PASSWORD}\n")
    socket = tmp_path / "state.sock"
    script: str = request.param("4mb")
    for there, here in (
        ("/SECRETS/", f"{tmp_path}/"),
        ("--dir /data", f"--dir {tmp_path}/data"),
        ("redis-server ", f"redis-server --port 0 --unixsocket {socket} "),
    ):
        assert there in script
        script = script.replace(there, here)
    path = path_with_redis_server(tmp_path)

    @asynccontextmanager
    async def started() -> AsyncIterator[Store]:
        socket.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", script, env={"PATH": path}, stdout=subprocess.DEVNULL
        )
        url = f"unix://{socket}?password_file={password_file}"
        try:
            await wait_until_ready(url, has_ended=lambda: process.returncode is not None)
            async with Store(url) as store:
                yield store
        finally:
            process.kill()
            await process.wait()

    return started


async def test_a_killed_store_comes_back_with_everything_that_was_confirmed(start: Start) -> None:
    """Fails without the log, and with one that is not on the volume."""
    async with start() as store:
        await store.call("SET", KEY, RECORD, "PX", 3_600_000)
    async with start() as store:
        assert as_bytes(await store.call("GET", KEY)) == RECORD
        assert 0 < int(await store.call("PTTL", KEY)) <= 3_600_000  # type: ignore[arg-type]


async def test_a_full_store_refuses_what_is_new_and_drops_nothing(start: Start) -> None:
    """Fails with a policy that evicts: a response would be gone before its time."""
    async with start() as store:
        await store.call("SET", KEY, RECORD, "PX", 3_600_000)
        with pytest.raises(StoreError, match="used memory > 'maxmemory'"):
            for number in range(64):
                await store.call("SET", f"pdstate:response:t:more_{number}", b"x" * (1 << 17), "PX", 3_600_000)
        assert as_bytes(await store.call("GET", KEY)) == RECORD
        assert await store.call("DEL", KEY) == 1


async def test_who_has_no_password_reads_nothing(start: Start, tmp_path: Path) -> None:
    async with start(), Store(f"unix://{tmp_path}/state.sock") as stranger:
        with pytest.raises(StoreError, match=r"[Aa]uthentication required"):
            await stranger.call("GET", KEY)
