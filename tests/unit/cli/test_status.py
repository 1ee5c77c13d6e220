"""`pdserve status`: the table of workers, the headline and the exit code."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from rich.console import Console

from pdserve.cli.__main__ import main
from pdserve.cli.status import ClusterStatus, render
from tests.unit.cli.fake_router import FakeRouter, running

CLUSTER: dict[str, Any] = {
    "router": {
        "status": "ready",
        "reason": None,
        "degraded": {},
        "version": "0.1.0",
        "model": "tiny",
        "running": 3,
        "queued": 1,
    },
    "redis": {"available": True},
    "workers": [
        {
            "worker_id": f"{tier}-0",
            "tier": tier,
            "ready": True,
            "epoch": 7,
            "grpc_address": "127.0.0.1:1",
            "http_address": f"127.0.0.1:{port}",
            "max_num_seqs": 64,
            "total_blocks": 200,
            "free_blocks": 150,
            "running": 2,
            "waiting": 4,
            "queued_tokens": 999,
        }
        for tier, port in (("decode", 5001), ("prefill", 5002))
    ],
}


def changed(**changes: Any) -> dict[str, Any]:
    cluster = copy.deepcopy(CLUSTER)
    for name, value in changes.items():
        cluster[name] = {**cluster[name], **value} if isinstance(value, dict) else value
    return cluster


def text_of(cluster: dict[str, Any], width: int = 140) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(ClusterStatus.model_validate(cluster), "http://r", width=width))
    return capture.get()


def test_each_worker_has_a_row_prefill_workers_first() -> None:
    rows = [line.split() for line in text_of(CLUSTER).splitlines() if line.startswith(("prefill-", "decode-"))]
    assert rows == [
        ["prefill-0", "prefill", "ready", "2/64", "4", "999", "█░░░░", "25%", "-", "127.0.0.1:5002"],
        ["decode-0", "decode", "ready", "2/64", "4", "999", "█░░░░", "25%", "-", "127.0.0.1:5001"],
    ]


def test_the_paths_of_blocks_are_shown() -> None:
    paths = {"paths": {"cma": 1, "tcp": 2}, "degraded": "to decode-0: tcp instead of cma: why. What to do."}
    cluster = changed(workers=[{**each, "transport": paths} for each in CLUSTER["workers"]])
    assert "25%  cma tcp  127.0.0.1:5001" in text_of(cluster)


def test_a_terminal_of_80_cells_shows_one_line_per_worker() -> None:
    cluster = changed(workers=[{**each, "ready": False, "queued_tokens": 99999} for each in CLUSTER["workers"]])
    assert len(text_of(cluster, 80).splitlines()) == len(text_of(cluster).splitlines()) == 6


def test_the_headline_shows_health_and_load() -> None:
    text = text_of(CLUSTER)
    assert "http://r  healthy  tiny  pdserve 0.1.0" in text
    assert "3 running, 1 queued   redis: available" in text


def test_the_headline_shows_the_commit_of_a_hubs_model() -> None:
    assert "  tiny@0123456789ab  pdserve" in text_of(changed(router={"model_revision": "0123456789abcdef" * 3}))
    assert "  tiny  pdserve" in text_of(CLUSTER)


def test_a_tier_without_workers_is_named() -> None:
    text = text_of(changed(workers=[CLUSTER["workers"][0]]))
    assert ["-", "prefill", "no", "worker"] in [line.split() for line in text.splitlines()]


def test_degraded_subjects_are_shown_and_count_as_healthy() -> None:
    cluster = changed(router={"degraded": {"redis": "unreachable for 3 s"}}, redis={"available": False})
    text = text_of(cluster)
    assert "degraded" in text
    assert "redis: unreachable for 3 s" in text
    assert ClusterStatus.model_validate(cluster).is_healthy


@pytest.mark.parametrize(
    "cluster",
    [
        changed(router={"status": "not_ready", "reason": "draining"}),
        changed(workers=[]),
        changed(workers=[CLUSTER["workers"][1]]),
        changed(workers=[{**CLUSTER["workers"][0], "ready": False}]),
    ],
    ids=["draining", "no workers", "no decode worker", "decode worker not ready"],
)
def test_a_cluster_that_does_not_serve_gives_exit_code_1(
    cluster: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeRouter({"/v1/cluster": (200, cluster)})) as router:
        assert main(["status", "--base-url", router.base_url]) == 1
        assert main(["status", "--base-url", router.base_url, "--json"]) == 1
    assert "not serving" in capsys.readouterr().out


def test_a_healthy_cluster_gives_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter({"/v1/cluster": (200, CLUSTER)})) as router:
        assert main(["status", "--base-url", router.base_url]) == 0
        capsys.readouterr()
        assert main(["status", "--base-url", router.base_url + "/v1/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == CLUSTER


def test_an_unreachable_router_is_reported_in_one_line_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--base-url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: Cannot reach http://127.0.0.1:9: Connection refused. Is `pdserve up` running?")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, b"hello"), "does not answer like a pdserve router"),
        ((200, {"router": {}}), "does not answer like a pdserve router"),
        ((500, {"error": {"message": "broken"}}), "answered 500: broken"),
        ((500, b""), "answered 500: no explanation"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_other_answers_are_reported_in_one_line_with_exit_code_1(
    answer: tuple[int, object], words: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeRouter({"/v1/cluster": answer})) as router:
        assert main(["status", "--base-url", router.base_url, *flags]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://a", "http://", ":80"])
def test_a_wrong_base_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--base-url", url]) == 1
    assert "is not an address such as" in capsys.readouterr().err
