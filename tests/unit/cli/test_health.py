"""`pdserve health`: the exit code and the line that it prints."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from pdserve.base import addresses
from pdserve.cli.__main__ import main


@contextmanager
def service(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """The `host:port` of a server with these answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def state(status: str, reason: str | None = None, **degraded: str) -> bytes:
    return json.dumps({"status": status, "reason": reason, "degraded": degraded}).encode()


def test_a_ready_service_is_healthy_and_what_is_degraded_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with service({"/readyz": (200, state("ready", redis="unreachable"))}) as address:
        assert main(["health", f"http://{address}/"]) == 0
    assert capsys.readouterr().out == "ready: redis: unreachable\n"


def test_a_loading_service_lives_but_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    body = state("not_ready", "loading")
    with service({"/readyz": (503, body), "/livez": (200, body)}) as address:
        assert main(["health", address]) == 1
        assert main(["health", address, "--live"]) == 0
    assert capsys.readouterr().out == "not_ready: loading\n" * 2


def test_a_service_of_another_kind_shows_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with service({"/readyz": (404, b"<html>")}) as address:
        assert main(["health", address]) == 1
    assert "answered 404" in capsys.readouterr().out


def test_no_answer_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://host", "http://host:port", "http://"])
def test_an_address_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", url]) == 1
    assert "is not an address such as http://127.0.0.1:8000" in capsys.readouterr().err


def test_the_host_auto_is_the_address_of_this_hosts_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with service({"/readyz": (200, state("ready"))}) as address:
        monkeypatch.setattr("pdserve.cli.health.parse_host", {"auto": "127.0.0.1"}.__getitem__)
        assert main(["health", f"http://auto:{address.split(':')[1]}"]) == 0
    assert capsys.readouterr().out == "ready\n"


def _resolves_to(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "3f2a9c1b2d4e")
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (one, 0)) for one in found])


def test_auto_is_the_first_address_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolves_to(monkeypatch, "127.0.1.1", "fe80::1%eth0", "172.18.0.5", "10.0.0.2")
    assert addresses.parse_host("auto") == "172.18.0.5"
    assert addresses.parse_worker_id("auto") == "3f2a9c1b2d4e"


def test_auto_is_refused_where_the_name_means_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolves_to(monkeypatch, "127.0.1.1")
    with pytest.raises(ValueError, match=r"found only 127\.0\.1\.1 for the host name '3f2a9c1b2d4e'"):
        addresses.parse_host("auto")


def test_other_values_stay_as_they_are() -> None:
    assert (addresses.parse_host("10.0.0.2"), addresses.parse_worker_id("decode-0")) == ("10.0.0.2", "decode-0")
