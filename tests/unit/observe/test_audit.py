"""The audit log: what is written of refusals, how much of a flood, and where it goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import NotFound, Overloaded, PdserveError, PeerLost, RequestError, SetupError
from pdserve.observe import audit
from pdserve.observe.audit import MAX_KINDS, Caller, RefusalCounts, RefusalKind, Refusals, audit_file

CALLER = Caller(
    client="10.0.0.7", endpoint="POST /v1/completions", model="m", request_id="cmpl-1", forwarded_for="192.0.2.1"
)


def kind(client: str) -> RefusalKind:
    return RefusalKind(reason="overloaded", status=429, client=client, endpoint="POST /v1/completions", model="m")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The file of the audit log, which is open during the test."""
    with audit_file(str(tmp_path / "audit.log"), "router_svc"):
        yield tmp_path / "audit.log"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_first_refusal_of_a_kind_is_a_line_and_the_others_are_counted() -> None:
    counts = RefusalCounts()
    assert [counts.add(kind("a"), str(number)) for number in range(4)] == [True, False, False, False]
    assert counts.add(kind("b"), "4")
    assert list(counts.repeated()) == [(kind("a"), 3, "3")]


def test_kinds_beyond_the_limit_are_counted_together() -> None:
    counts = RefusalCounts()
    written = [counts.add(kind(str(number)), "") for number in range(MAX_KINDS + 5)]
    assert sum(written) == MAX_KINDS
    assert (len(counts.kinds), counts.others) == (MAX_KINDS, 5)


async def test_a_refusal_names_reason_client_and_request_and_no_text_of_the_error(path: Path) -> None:
    refusals = Refusals()
    refusals.refused(NotFound("The model `a secret prompt` does not exist."), CALLER)
    refusals.flush()
    [line] = lines(path)
    del line["time"]
    assert line == {
        "level": "info",
        "process": "router_svc",
        "logger": "audit",
        "event": "request_refused",
        "reason": "not_found",
        "status": 404,
        "client": "10.0.0.7",
        "endpoint": "POST /v1/completions",
        "model": "m",
        "request_id": "cmpl-1",
        "forwarded_for": "192.0.2.1",
    }


@pytest.mark.virtual_time
async def test_a_flood_is_a_line_at_its_start_and_one_after_each_interval(path: Path) -> None:
    refusals = Refusals()
    for _ in range(1000):
        refusals.refused(Overloaded("full", retry_after_s=1), CALLER)
    await asyncio.sleep(audit.INTERVAL_S + 1)
    assert [(line["event"], line.get("count")) for line in lines(path)] == [
        ("request_refused", None),
        ("requests_refused", 999),
    ]
    # The next interval starts with its first refusal.
    refusals.refused(Overloaded("full", retry_after_s=1), CALLER)
    await asyncio.sleep(audit.INTERVAL_S + 1)
    assert [line["event"] for line in lines(path)][2:] == ["request_refused"]


async def test_a_flood_of_many_kinds_writes_a_bounded_number_of_lines(path: Path) -> None:
    refusals = Refusals()
    for number in range(5000):
        refusals.refused(RequestError("no"), Caller(client=str(number % 500), endpoint="POST /v1/completions"))
    refusals.flush()
    written = lines(path)
    assert len(written) == 2 * MAX_KINDS + 1
    assert sum(line.get("count", 1) for line in written) == 5000
    assert written[-1]["reason"] == "others"


@pytest.mark.parametrize("error", [PeerLost("gone"), PdserveError("broken")])
async def test_failures_of_the_cluster_are_no_refusals(path: Path, error: PdserveError) -> None:
    refusals = Refusals()
    with pytest.raises(type(error)), refusals.watching(CALLER):
        raise error
    refusals.flush()
    assert lines(path) == []


async def test_texts_of_clients_are_cut(path: Path) -> None:
    refusals = Refusals()
    long = "x" * 10_000
    refusals.refused(
        RequestError("no"), Caller(client="a", endpoint=long, model=long, request_id=long, forwarded_for=long)
    )
    refusals.flush()
    [line] = lines(path)
    assert max(len(str(value)) for value in line.values()) <= 100


def test_a_file_that_was_moved_away_is_opened_again_and_sighup_ends_nothing(path: Path) -> None:
    audit.action("drain_started", requests=1)
    path.rename(path.with_suffix(".1"))
    os.kill(os.getpid(), signal.SIGHUP)
    audit.action("drain_ended", requests_left=0)
    assert [line["event"] for line in lines(path.with_suffix(".1"))] == ["drain_started"]
    assert [line["event"] for line in lines(path)] == ["drain_ended"]


def test_the_file_is_not_for_every_user(path: Path) -> None:
    audit.action("drain_started")
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0


def test_a_file_that_cannot_be_written_loses_lines_and_says_so_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audit._AuditFile, "flush", full)
    for _ in range(3):
        audit.action("drain_started")
    ours = [record.message for record in caplog.records if record.name != "audit"]
    assert ours == ["audit_log_failed"]


def test_without_a_file_the_lines_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with audit_file(None, "router_svc"):
        audit.stop_requested("SIGTERM")
    [record] = caplog.records
    assert (record.name, record.message) == ("audit", "stop_requested")


def test_a_file_that_cannot_be_opened_is_an_error_that_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--audit-log"), audit_file(str(tmp_path / "no" / "audit.log"), "router_svc"):
        pass
