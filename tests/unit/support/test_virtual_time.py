"""The event loop whose clock jumps: timers fire in order and at their time, and real work comes before any of them."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tests.support.virtual_time import VirtualTimeLoop


@pytest.mark.virtual_time
async def test_an_hour_passes_at_once() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    started_at = loop.time()
    await asyncio.sleep(3600)
    assert loop.time() == pytest.approx(started_at + 3600)


@pytest.mark.virtual_time
async def test_timers_fire_in_order_and_at_their_time() -> None:
    loop = asyncio.get_running_loop()
    fired: list[tuple[str, float]] = []
    done = asyncio.Event()
    loop.call_at(2.0, lambda: (fired.append(("second", loop.time())), done.set()))
    loop.call_at(1.0, lambda: fired.append(("first", loop.time())))
    await done.wait()
    assert fired == [("first", pytest.approx(1.0)), ("second", pytest.approx(2.0))]


@pytest.mark.virtual_time
async def test_a_timeout_fires_without_waiting() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await asyncio.Event().wait()


@pytest.mark.virtual_time
async def test_a_call_in_a_thread_ends_before_any_timeout() -> None:
    release = threading.Event()
    loop = asyncio.get_running_loop()
    call = loop.run_in_executor(None, release.wait)
    loop.call_soon(release.set)
    async with asyncio.timeout(0.001):
        assert await call


@pytest.mark.virtual_time
async def test_bytes_that_have_arrived_are_read_before_the_clock_jumps() -> None:
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.send(b"x")
        async with asyncio.timeout(0.001):
            assert await loop.sock_recv(near, 1) == b"x"
        assert loop.time() == 0


async def test_other_tests_have_a_real_clock() -> None:
    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
