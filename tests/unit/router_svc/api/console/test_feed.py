"""The stream of states: its content, its bounds, and readers that are slow or leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from pdserve.peers.workers import WorkerLoad
from router_svc.api.console.feed import Feed
from router_svc.records.request_state import RequestState
from tests.support.console import MAX_QUEUED, FakeCluster, many_workers, serving
from tests.support.deadline import DEADLINE_S
from tests.support.records import worker_record
from tests.support.redis import eventually


class Reader:
    """A reader of the stream, which keeps the state as the page does."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.state: dict[str, Any] = {}
        self.names: list[str] = []

    async def next(self) -> dict[str, Any]:
        """The next event's data. Raises `EOFError` when the stream has ended."""
        async with asyncio.timeout(DEADLINE_S):
            block = await self._response.content.readuntil(b"\n\n")
        if not block:
            raise EOFError
        name, data = (line.split(": ", 1)[1] for line in block.decode().strip().split("\n"))
        self.names.append(name)
        message: dict[str, Any] = json.loads(data)
        self.state = message["state"] if name == "state" else _patched(self.state, message["patch"])
        return message

    async def until(self, condition: Any) -> None:
        """Reads until the state fulfils the condition."""
        while not self.state or not condition(self.state):
            await self.next()


def _patched(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _patched(result.get(name), value)
    return result


def _titles(state: dict[str, Any]) -> list[str]:
    return [problem["title"] for problem in state["problems"]]


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Reader]:
    """A stream that was accepted."""
    async with aiohttp.ClientSession(read_bufsize=2**22) as session, session.get(f"{url}/console/events") as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert "Content-Security-Policy" in response.headers
        yield Reader(response)


async def test_the_first_event_is_the_whole_state() -> None:
    fake = FakeCluster(many_workers(1, 2))
    fake.cache("decode-0", 7)
    fake.add_request("cmpl-a")
    async with serving(fake) as (url, _), reading(url) as reader:
        message = await reader.next()
        assert reader.names == ["state"]
        state = message["state"]
        assert set(state["workers"]) == {"prefill-0", "decode-0", "decode-1"}
        assert state["workers"]["decode-0"]["cached_blocks"] == 7
        assert state["tiers"]["decode"]["ready"] == 2
        assert state["limits"] == {"max_queued": MAX_QUEUED, "expects_prefill": True}
        assert state["prefix"] == {"blocks": 7, "copies": 7, "dropped": 0, "current": True}
        assert state["requests"]["cmpl-a"]["state"] == "finished"
        assert state["problems"] == []
        assert state["router"]["status"] == "ready"


async def test_further_events_have_only_what_changed() -> None:
    fake = FakeCluster(many_workers(1, 2))
    async with serving(fake) as (url, _), reading(url) as reader:
        await reader.next()
        fake.set_load(1, WorkerLoad(running=5, free_blocks=40))
        message = await reader.next()
        while not message["patch"]:
            message = await reader.next()
        assert set(message["patch"]) <= {"workers", "tiers"}
        assert message["patch"]["workers"] == {
            "decode-0": {"running": 5, "free_blocks": 40, "prefill_tokens_per_s": None}
        }
        fake.directory.workers.pop()
        await reader.until(lambda state: "decode-1" not in state["workers"])
        fake.add_request("cmpl-new", state=RequestState.QUEUED)
        await reader.until(lambda state: "cmpl-new" in state["requests"])


async def test_problems_are_in_the_state() -> None:
    fake = FakeCluster([worker_record("decode-0")])
    async with serving(fake) as (url, _), reading(url) as reader:
        await reader.until(lambda state: _titles(state) == ["The prefill tier is missing"])
        fake.health.not_ready = "draining"
        await reader.until(lambda state: state["problems"][0]["title"] == "This router is draining")


async def test_failures_of_the_last_minutes_are_counted() -> None:
    fake = FakeCluster(many_workers(1, 1))
    for index in range(4):
        fake.add_request(f"cmpl-old{index}", state=RequestState.FAILED, ago_s=4000, error="old")
    async with serving(fake) as (url, _), reading(url) as reader:
        assert (await reader.next())["state"]["problems"] == []
        for index in range(3):
            fake.add_request(f"cmpl-new{index}", state=RequestState.FAILED, error="Worker decode-0 was lost.")
        await reader.until(lambda state: _titles(state) == ["Requests fail"])
    [problem] = reader.state["problems"]
    assert problem["text"] == "3 of the last 3 requests failed. The latest: Worker decode-0 was lost."


async def test_the_course_of_the_load_is_known_before_anyone_reads() -> None:
    fake = FakeCluster(many_workers(1, 1))
    async with serving(fake, interval_s=0.01, intervals_per_sample=1) as (url, feed):

        async def has_sampled() -> bool:
            return feed.num_samples >= 3

        await eventually(has_sampled)
        async with reading(url) as reader:
            history = (await reader.next())["history"]
            assert len(history["rows"]) >= 3
            assert history["columns"][:3] == ["at", "running", "queued"]
            fake.gate.num_waiting = 77
            while (message := await reader.next())["sample"] is None or message["sample"][2] != 77:
                pass


async def test_all_readers_share_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCluster(many_workers(2, 2))
    encoded = []
    dumps = json.dumps
    monkeypatch.setattr("router_svc.api.console.feed.json.dumps", lambda *a, **b: encoded.append(1) or dumps(*a, **b))
    async with serving(fake) as (url, _), reading(url) as first, reading(url) as second, reading(url) as third:
        for _ in range(4):
            for reader in (first, second, third):
                last = await reader.next()
        # A whole state per joining reader at most, and one difference per version.
        assert len(encoded) <= 3 + last["version"]


async def test_without_readers_only_the_load_is_sampled() -> None:
    fake = FakeCluster(many_workers(1, 1))
    async with serving(fake, interval_s=0.01, intervals_per_sample=1) as (url, feed):
        async with reading(url) as reader:
            version = (await reader.next())["version"]

        async def is_alone() -> bool:
            return feed.num_readers == 0

        await eventually(is_alone)
        samples = feed.num_samples

        async def has_gone_on() -> bool:
            return feed.num_samples >= samples + 3

        before = feed.version
        await eventually(has_gone_on)
        assert feed.version == before >= version


async def test_readers_beyond_the_limit_are_refused_with_a_text() -> None:
    fake = FakeCluster()
    async with serving(fake, max_readers=2) as (url, _), aiohttp.ClientSession() as session:
        async with reading(url) as first, reading(url) as second:
            await first.next()
            await second.next()
            async with session.get(f"{url}/console/events") as refusal:
                assert refusal.status == 429
                assert int(refusal.headers["Retry-After"]) > 0
                message = (await refusal.json())["error"]["message"]
            assert message.startswith("This router has 2 open consoles, limit 2 (--console-clients).")

        async def is_accepted() -> bool:
            async with session.get(f"{url}/console/events") as response:
                return response.status == 200

        await eventually(is_accepted)


async def test_a_reader_that_does_not_read_is_dropped_and_the_others_go_on() -> None:
    fake = FakeCluster(many_workers(0, 400))
    async with serving(fake, interval_s=0.01, write_timeout_s=0.1) as (url, feed), reading(url) as healthy:
        await healthy.next()
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as stalled:  # type: ignore[arg-type]
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.sendall(b"GET /console/events HTTP/1.1\r\nHost: x\r\n\r\n")

            async def is_counted() -> bool:
                return feed.num_readers == 2

            await eventually(is_counted)
            load, dropped = 0, False
            async with asyncio.timeout(DEADLINE_S):
                while not dropped:
                    load = (load + 1) % 90
                    for index in range(400):
                        fake.set_load(index, WorkerLoad(running=load, free_blocks=load, queued_tokens=load))
                    await healthy.next()
                    dropped = feed.num_readers == 1
        assert set(healthy.names[1:]) <= {"patch", "state"}


async def test_a_late_reader_gets_a_whole_state_instead_of_what_it_missed() -> None:
    feed = Feed(FakeCluster(many_workers(1, 1)).state(), max_readers=2)
    with feed.reader():
        first = await feed.next(None)
        assert first is not None
        with feed.reader():
            pass
    with feed.reader():  # The first one again: the state is read anew.
        second = await feed.next(first.version)
        assert second is not None
        assert second.version == first.version + 1


async def test_a_reader_that_leaves_frees_its_slot() -> None:
    async with serving(FakeCluster()) as (url, feed):
        async with reading(url) as reader:
            await reader.next()
            assert feed.num_readers == 1

        async def is_free() -> bool:
            return feed.num_readers == 0

        await eventually(is_free)


async def test_streams_end_after_their_age_and_when_the_router_stops() -> None:
    async with serving(FakeCluster(), max_age_s=0.1) as (url, _), reading(url) as reader:
        with pytest.raises(EOFError):
            while True:
                await reader.next()
    async with serving(FakeCluster()) as (url, feed), reading(url) as reader:
        await reader.next()
        feed.close()
        with pytest.raises(EOFError):
            while True:
                await reader.next()


async def test_a_state_of_2000_workers_is_encoded_once_and_patches_stay_small() -> None:
    fake = FakeCluster(many_workers(900, 1100))
    async with serving(fake) as (url, _), reading(url) as reader:
        message = await reader.next()
        assert len(message["state"]["workers"]) == 2000
        fake.set_load(3, WorkerLoad(running=77))
        await reader.until(lambda state: state["workers"]["prefill-3"]["running"] == 77)
        assert len(reader.names) >= 2


async def test_no_text_of_a_prompt_is_in_the_state() -> None:
    fake = FakeCluster(many_workers(1, 1))
    fake.add_request("cmpl-a")
    fields = {
        *("request_id", "endpoint", "accepted_at", "prompt_tokens", "max_tokens", "n", "state", "attempt", "outcome"),
        *("phases", "timeline", "prefilled_by", "local_prefill_reason", "workers", "retries", "fallbacks"),
    }
    state = fake.state().read()
    assert set(state["requests"]["cmpl-a"]) == fields  # type: ignore[index, call-overload, arg-type]
