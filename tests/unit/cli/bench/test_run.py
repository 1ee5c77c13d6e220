"""The client and the runner against a fake server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from pdserve.cli.bench.run import run_workload
from pdserve.cli.bench.workload import CHAT_COMPLETIONS, BenchRequest, BenchResult, RequestRecord, Target
from tests.unit.cli.bench.fake_server import (
    CUT,
    DONE,
    Body,
    FakeServer,
    Reply,
    completion,
    event,
    running,
    token,
    usage,
)

REQUEST = BenchRequest(prompt=(1, 2, 3), max_tokens=4)
#: Upper bound of a wait that ends at once unless the test fails.
PATIENCE_S = 30.0


def _run(server: FakeServer, *requests: BenchRequest, **options: object) -> BenchResult:
    target = Target(base_url=server.base_url, model="tiny", **options)  # type: ignore[arg-type]
    requests = requests or (REQUEST,)
    return asyncio.run(run_workload(target, requests, [0.0] * len(requests)))


def _only(server: FakeServer, **options: object) -> RequestRecord:
    [record] = _run(server, **options).records
    return record


def _streaming(*pieces: bytes) -> FakeServer:
    return FakeServer(reply=lambda _: list(pieces))


def test_token_ids_are_sent_as_a_streamed_completion_with_usage() -> None:
    with running(FakeServer()) as server:
        record = _only(server, fields={"temperature": 0, "ignore_eos": True}, headers={"Authorization": "Bearer k"})
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "ignore_eos": True,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer k"
    assert record.failure is None
    assert (record.input_tokens, record.output_tokens, record.text) == (3, 4, "xxxx")
    assert len(record.arrivals_s) == 4
    assert 0 < record.arrivals_s[0] <= record.arrivals_s[-1] <= record.end_s


def test_a_chat_is_sent_as_a_message_and_starts_with_its_first_token() -> None:
    def chunk(finish_reason: str | None = None, **delta: object) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

    pieces = [chunk(role="assistant", content=""), chunk(content="a"), chunk(content="b"), chunk("stop"), usage(9, 2)]
    with running(_streaming(*pieces, DONE)) as server:
        [record] = _run(server, BenchRequest(prompt="Hi", max_tokens=2), endpoint=CHAT_COMPLETIONS).records
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert "prompt" not in server.bodies[0]
    assert (record.text, record.input_tokens, record.output_tokens) == ("ab", 9, 2)
    assert len(record.arrivals_s) == 2


def test_tokens_are_counted_by_usage_and_arrivals_by_chunks() -> None:
    with running(_streaming(token("abc"), token("def", "length"), usage(7, 6), DONE)) as server:
        record = _only(server)
    assert (record.output_tokens, len(record.arrivals_s), record.is_counted_by_server) == (6, 2, True)


def test_without_usage_chunks_and_the_prompt_are_counted() -> None:
    with running(_streaming(token("a"), token("b", "length"), DONE)) as server:
        record = _only(server)
    assert (record.input_tokens, record.output_tokens, record.is_counted_by_server) == (3, 2, False)


def test_a_completion_whose_only_token_has_no_text_has_a_first_token() -> None:
    with running(_streaming(token("", "stop"), usage(3, 1), DONE)) as server:
        record = _only(server)
    assert record.failure is None
    assert record.arrivals_s == (record.end_s,)


@pytest.mark.parametrize(
    ("reply", "reason", "message"),
    [
        ((429, {"error": {"message": "queue full"}}), "HTTP 429", "queue full"),
        ((500, b"<html>"), "HTTP 500", "Internal Server Error"),
        ([token("a"), CUT], "broken stream", ""),
        ([token("a")], "broken stream", "ended before"),
        ([DONE], "broken stream", "ended before"),
        ([], "broken stream", "ended before"),
        ([token("a"), event({"error": {"message": "worker lost"}}), DONE], "error in the stream", "worker lost"),
        ([b"data: hello\n\n"], "not a completion", "hello"),
    ],
)
def test_a_failure_has_a_reason_and_the_servers_message(reply: Reply, reason: str, message: str) -> None:
    with running(FakeServer(reply=lambda _: reply)) as server:
        record = _only(server)
    assert record.failure is not None
    assert record.failure.reason == reason
    assert message in record.failure.message


def test_text_received_before_a_stream_broke_is_kept() -> None:
    with running(_streaming(token("a"), token("b"), CUT)) as server:
        record = _only(server)
    assert record.text == "ab"
    assert 1 <= len(record.arrivals_s) <= 2


def test_a_closed_port_is_reported_as_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        record = _only(FakeServer(base_url=f"http://127.0.0.1:{unused.getsockname()[1]}"))
    assert record.failure is not None
    assert record.failure.reason == "unreachable"


def test_a_server_that_stops_sending_is_a_timeout() -> None:
    gone = threading.Event()

    def stall(_: Body) -> Iterator[bytes]:
        yield token("a")
        gone.wait(PATIENCE_S)

    with running(FakeServer(reply=stall)) as server:
        record = _only(server, silence_timeout_s=0.05)
        gone.set()
    assert record.failure is not None
    assert record.failure.reason == "timeout"


def test_a_failure_does_not_affect_other_requests_nor_their_order() -> None:
    def reply(body: Body) -> Reply:
        return (429, {}) if body["max_tokens"] == 2 else completion([f"{body['max_tokens']}"])

    with running(FakeServer(reply=reply)) as server:
        result = _run(server, *(BenchRequest(prompt=(1,), max_tokens=n) for n in (1, 2, 3)))
    assert [record.text for record in result.records] == ["1", "", "3"]
    assert len(result.completed) == 2
    assert [failure.reason for failure in result.failures] == ["HTTP 429"]


class _Crowd:
    """Answers once `size` requests are in flight, and records the maximum."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._in_flight = 0
        self.max_in_flight = 0

    def __call__(self, _: Body) -> Iterator[bytes]:
        with self._lock:
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
        self._barrier.wait(PATIENCE_S)
        with self._lock:
            self._in_flight -= 1
        yield from completion(["x"])


def _run_many(server: FakeServer, arrivals_s: Sequence[float], limit: int | None) -> BenchResult:
    target = Target(base_url=server.base_url, model="tiny")
    requests = [REQUEST] * len(arrivals_s)
    return asyncio.run(run_workload(target, requests, arrivals_s, max_concurrency=limit))


def test_without_a_limit_all_requests_are_in_flight_together() -> None:
    crowd = _Crowd(12)
    with running(FakeServer(reply=crowd)) as server:
        assert len(_run_many(server, [0.0] * 12, None).completed) == 12
    assert crowd.max_in_flight == 12


def test_no_more_requests_than_the_limit_are_in_flight() -> None:
    crowd = _Crowd(3)
    with running(FakeServer(reply=crowd)) as server:
        assert len(_run_many(server, [0.0] * 12, 3).completed) == 12
    assert crowd.max_in_flight == 3


def test_no_request_is_sent_before_its_time() -> None:
    arrivals_s = [0.0, 0.01, 0.01, 0.05]
    with running(FakeServer()) as server:
        result = _run_many(server, arrivals_s, None)
    assert all(record.start_s >= at for record, at in zip(result.records, arrivals_s, strict=True))
    assert result.duration_s >= arrivals_s[-1]


def test_each_record_is_reported_when_its_request_has_ended() -> None:
    reported: list[RequestRecord] = []
    with running(FakeServer()) as server:
        target = Target(base_url=server.base_url, model="tiny")
        result = asyncio.run(run_workload(target, [REQUEST] * 3, [0.0] * 3, on_done=reported.append))
    assert sorted(record.start_s for record in reported) == sorted(record.start_s for record in result.records)


def test_requests_and_times_of_different_length_are_refused() -> None:
    with running(FakeServer()) as server, pytest.raises(ValueError, match="shorter"):
        asyncio.run(run_workload(Target(base_url=server.base_url, model="tiny"), [REQUEST] * 2, [0.0]))


def test_cancellation_closes_the_connections() -> None:
    started, closed = threading.Event(), threading.Event()

    def endless(_: Body) -> Iterator[bytes]:
        try:
            while True:
                yield token("a")
                started.set()
        finally:
            closed.set()

    async def cancelled(target: Target) -> None:
        task = asyncio.create_task(run_workload(target, [REQUEST], [0.0]))
        assert await asyncio.to_thread(started.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with running(FakeServer(reply=endless)) as server:
        asyncio.run(cancelled(Target(base_url=server.base_url, model="tiny")))
        assert closed.wait(PATIENCE_S)


def test_extra_fields_override_the_request() -> None:
    with running(FakeServer()) as server:
        _run(server, fields={"max_tokens": 1, "min_tokens": 1})
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["min_tokens"]) == (1, 1)
