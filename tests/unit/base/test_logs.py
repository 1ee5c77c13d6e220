"""Log lines as text and as JSON, with the ids of the request that they belong to."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from pdserve.base import logs
from pdserve.base.trace_context import TraceContext

TRACE = TraceContext("ab" * 16, "cd" * 8, True)

log = logs.get_logger("one")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Puts back what `configure` changes in the process."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    logging.captureWarnings(False)


def json_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    [line] = capsys.readouterr().err.splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_a_json_line_has_every_field_with_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router_svc", log_format="json")
    log.warning("redis_lost", since_s=1.5, failures=3, reason='a "quoted"\nline', url=None, error=ValueError("x"))
    line = json_line(capsys)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() == timedelta(0)
    assert line == {
        "level": "warning",
        "process": "router_svc",
        "logger": "one",
        "event": "redis_lost",
        "since_s": 1.5,
        "failures": 3,
        "reason": 'a "quoted"\nline',
        "url": None,
        "error": "x",
    }


def test_a_json_line_is_valid_whatever_the_fields_are(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router_svc", log_format="json")
    log.info("odd", ratio=float("nan"), level="mine", trace_id="mine")
    line = json_line(capsys)
    assert (line["ratio"], line["level"], line["level_"], line["trace_id"]) == ("nan", "info", "mine", "mine")


def test_a_traceback_is_one_field_of_the_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router_svc", log_format="json")
    try:
        raise ValueError("broken")
    except ValueError as error:
        log.error("handler_broke", exc=error)
    assert json_line(capsys)["exception"].endswith("ValueError: broken")


def test_lines_have_the_ids_of_the_request_of_their_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router_svc", log_format="json")

    async def serve(request_id: str, trace: TraceContext | None, entered: asyncio.Barrier) -> None:
        logs.enter_request(request_id, trace)
        await entered.wait()
        log.info("served")

    async def both() -> None:
        entered = asyncio.Barrier(2)
        async with asyncio.TaskGroup() as group:
            group.create_task(serve("a", TRACE, entered))
            group.create_task(serve("b", None, entered))

    asyncio.run(both())
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    ids = {line["request_id"]: (line.get("trace_id"), line.get("span_id")) for line in lines}
    assert ids == {"a": (TRACE.trace_id, TRACE.span_id), "b": (None, None)}


def test_text_stays_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router_svc")

    def request() -> None:
        logs.enter_request("r1", TRACE)
        log.info("ended", at=0.25, why="two words")

    contextvars.copy_context().run(request)
    time, _, rest = capsys.readouterr().err.strip().partition(" ")
    assert time.endswith("Z")
    assert rest == "INFO    router_svc one ended at=0.25 why='two words' request_id=r1"


@pytest.mark.parametrize("text", ["\x1b[2J", "a\rb", "a\u2028b", "\x00", "\u202e"])
def test_what_a_stranger_sends_moves_no_cursor_and_begins_no_line(text: str) -> None:
    assert logs.quote(text).isprintable()
