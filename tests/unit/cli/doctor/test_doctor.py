"""`pdserve doctor` without a cluster: the machine's findings, exit status and JSON."""

from __future__ import annotations

import json

import pytest

from pdserve.cli import doctor
from pdserve.cli.__main__ import main
from pdserve.cli.doctor.finding import error, exit_status, info, ok, warning
from pdserve.observe.facts.cluster import RedisFacts
from pdserve.redis.store import Store
from tests.support.machine import MACHINE, REDIS


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "machine_facts", lambda folders: MACHINE)
    monkeypatch.setattr(doctor, "DEFAULT_BASE_URL", "http://127.0.0.1:9")


def test_without_a_cluster_the_machine_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "no router answers at http://127.0.0.1:9: only this machine was checked" in " ".join(text.split())
    assert "0 errors, 0 warnings, 1 notes" in text


def test_a_named_router_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--base-url", "http://127.0.0.1:9"]) == 2
    content = json.loads(capsys.readouterr().out)
    assert content["status"] == 2
    first = content["findings"][0]
    assert (first["severity"], first["check"]) == ("error", "router")
    assert "Cannot reach http://127.0.0.1:9" in first["found"]
    assert {"versions", "memory", "disk"} <= {finding["check"] for finding in content["findings"]}
    assert content["pairs"] == []


def test_a_redis_that_is_away_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--redis-url", "redis://127.0.0.1:9"]) == 2
    first = json.loads(capsys.readouterr().out)["findings"][0]
    assert (first["check"], first["subject"]) == ("redis", "this machine")
    assert "127.0.0.1:9" in first["found"]


def test_redis_is_checked_with_the_prefix_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = []

    async def no_facts(store: Store) -> RedisFacts:
        prefixes.append(store.key("x"))
        return REDIS

    monkeypatch.setattr(doctor, "redis_facts", no_facts)
    assert main(["doctor", "--redis-url", "redis://127.0.0.1:9", "--redis-prefix", "mine"]) == 0
    assert prefixes == ["mine:x"]


def test_the_exit_status_is_that_of_the_worst_finding() -> None:
    fine = [ok("a", "s", "f"), info("b", "s", "f")]
    assert exit_status(fine) == 0
    assert exit_status([*fine, warning("c", "s", "f", "r")]) == 1
    assert exit_status([*fine, warning("c", "s", "f", "r"), error("d", "s", "f", "r")]) == 2
