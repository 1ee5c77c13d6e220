"""Deadlines and cancellation of open requests, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.base.errors import Cancelled, DeadlineExceeded, PeerLost, RequestError, codes_of
from pdserve.base.ids import RequestId
from pdserve.base.tasks import service_group
from router_svc.request.open_requests import OpenRequest, OpenRequests
from router_svc.routing.timeouts import TimeoutLimits

pytestmark = pytest.mark.virtual_time

ID = RequestId("cmpl-1")


def now() -> float:
    return asyncio.get_running_loop().time()


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


async def test_work_has_ended_when_the_deadline_is_an_error() -> None:
    ended, started = list[str](), now()
    with pytest.raises(DeadlineExceeded, match="not complete after 5 s, which is its timeout: it was decoding"):
        async with OpenRequests(TimeoutLimits()).entered(ID, "", 5.0) as opened:
            opened.doing = lambda: "it was decoding"
            async with service_group() as group:
                group.start(forever(ended), name="work")
                await asyncio.Event().wait()
    assert (ended, now() - started) == (["work"], 5.0)


async def test_the_timeout_of_a_body_counts_from_the_arrival_and_only_shortens() -> None:
    started = now()
    with pytest.raises(DeadlineExceeded, match="after 3 s"):
        async with OpenRequests(TimeoutLimits()).entered(ID, "", 5.0) as opened:
            await asyncio.sleep(2)
            opened.limit(3.0)
            opened.limit(60.0)
            await asyncio.Event().wait()
    assert now() - started == 3.0


async def test_a_timeout_that_is_over_when_the_body_arrives_ends_the_request_at_once() -> None:
    started = now()
    with pytest.raises(DeadlineExceeded):
        async with OpenRequests(TimeoutLimits()).entered(ID, "", 5.0) as opened:
            await asyncio.sleep(2)
            opened.limit(1.0)
            await asyncio.Event().wait()
    assert now() - started == 2.0


async def opened_forever(requests: OpenRequests, request_id: RequestId, tenant: str, ended: list[str]) -> None:
    with pytest.raises(Cancelled):
        async with requests.entered(request_id, tenant, 60.0):
            await forever(ended)


@pytest.mark.parametrize("given", ["cmpl-1", "1"])
async def test_a_request_is_cancelled_by_its_id_and_its_work_has_ended_then(given: str) -> None:
    requests, ended = OpenRequests(TimeoutLimits()), list[str]()
    async with asyncio.TaskGroup() as group:
        group.create_task(opened_forever(requests, ID, "", ended))
        await asyncio.sleep(0)
        assert await requests.cancel(given, None)
        assert ended == ["work"]
    assert not await requests.cancel(given, None)
    assert len(requests) == 0


async def test_only_the_owner_cancels_and_others_learn_nothing() -> None:
    requests, ended = OpenRequests(TimeoutLimits()), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):  # Clients may repeat an id.
            group.create_task(opened_forever(requests, ID, "mine", ended))
        await asyncio.sleep(0)
        assert not await requests.cancel(ID, "other")
        assert not await requests.cancel("cmpl-unknown", "other")
        assert not ended
        assert await requests.cancel(ID, "mine")
    assert ended == ["work", "work"]


async def test_a_client_that_leaves_and_an_error_of_the_work_are_no_end_by_the_deadline() -> None:
    requests = OpenRequests(TimeoutLimits())
    seen: list[OpenRequest] = []

    async def left() -> None:
        async with requests.entered(ID, "", 60.0) as opened:
            seen.append(opened)
            await asyncio.Event().wait()

    task = asyncio.create_task(left())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen[0].ended_by() is None
    with pytest.raises(PeerLost):
        async with requests.entered(ID, "", 60.0):
            raise PeerLost("gone")
    with pytest.raises(TimeoutError):
        async with requests.entered(ID, "", 60.0), asyncio.timeout(1.0):
            await asyncio.Event().wait()
    assert len(requests) == 0


def test_timeouts_beyond_the_limit_are_refused_and_not_cut() -> None:
    limits = TimeoutLimits(default_s=100.0, max_s=50.0)
    assert limits.of_header(None) == 50.0
    assert limits.of_header(" 12.5 ") == 12.5
    for text in ("51", "0", "-1", "nan", "inf", "soon", ""):
        with pytest.raises(RequestError, match="X-Request-Timeout"):
            limits.of_header(text)


def test_openai_clients_neither_repeat_nor_misread_a_request_that_was_ended() -> None:
    assert (codes_of(Cancelled("x")).http, codes_of(Cancelled("x")).grpc) == (499, "CANCELLED")
    assert (codes_of(DeadlineExceeded("x")).http, codes_of(DeadlineExceeded("x")).grpc) == (504, "DEADLINE_EXCEEDED")
