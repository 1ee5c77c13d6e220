"""A vulnerability with a fix fails the audit, and a service that knows nothing does not pass as a clean one."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.dependencies import audit
from tests.dependencies.pins import pinned

CANARY = {"name": "django", "version": "1.2", "vulns": [{"id": "PYSEC-2011-1", "fix_versions": ["1.2.5"]}]}


def report(*found: dict[str, Any]) -> dict[str, Any]:
    return {"dependencies": [CANARY, {"name": "aiohttp", "version": "3.14.2", "vulns": list(found)}]}


FIXED = {"id": "GHSA-cq5v-8q36-5273", "aliases": ["CVE-2026-69244"], "fix_versions": ["3.14.3"]}
OPEN = {"id": "PYSEC-2026-1", "aliases": [], "fix_versions": []}


def test_only_what_a_release_has_fixed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, unfixed = audit.vulnerabilities(report(FIXED, OPEN))
    assert str(fixed) == "aiohttp 3.14.2: GHSA-cq5v-8q36-5273 = CVE-2026-69244, fixed in 3.14.3"
    assert (fixed.fails, unfixed.fails) == (True, False)
    monkeypatch.setattr(audit, "ACCEPTED", {"CVE-2026-69244": "no client here"})
    assert not fixed.fails
    assert str(fixed).endswith("accepted: no client here")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"dependencies": [CANARY | {"vulns": []}]}, "has no advisories"),
        ({"dependencies": [{"name": "django", "skip_reason": "not found"}]}, "has no advisories"),
        ({"dependencies": [CANARY, {"name": "aiohttp", "skip_reason": "not found"}]}, "does not know 1 of 2"),
    ],
)
def test_a_service_that_knows_nothing_has_not_audited(answer: dict[str, Any], words: str) -> None:
    with pytest.raises(audit.NotAudited, match=words):
        audit.vulnerabilities(answer)


def test_the_audit_passes_fails_or_says_why_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, Any] = {"pypi": report(FIXED, OPEN)}

    def ask(service: str, packages: dict[str, str], options: object = ()) -> Any:
        assert packages.items() >= pinned().items()
        if service not in answers:
            raise audit.NotAudited("no answer")
        return answers[service]

    monkeypatch.setattr(audit, "ask", ask)
    monkeypatch.setattr(audit, "problems", lambda images: [])
    assert audit.main([]) == 1
    assert "1 to be fixed (pypi)" in capsys.readouterr().out
    answers["osv"] = report(OPEN)
    assert audit.main([]) == 0
    assert "no release fixes it" in capsys.readouterr().out
    answers.clear()
    assert audit.main([]) == 0
    assert capsys.readouterr().out == "audit: skipped (osv: no answer; pypi: no answer)\n"


def test_nothing_here_needs_the_release_that_is_known_to_be_vulnerable() -> None:
    assert audit.CANARY[0] not in {name.lower() for name in pinned()}


class _Osv(BaseHTTPRequestHandler):
    """A service that knows the release that is asked about, and one vulnerability of a pinned package."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, known = query["package"]["name"], {"django": "1.2.5", "multidict": "999"}
        events = [{"introduced": "0"}, {"fixed": known.get(name, "0")}]
        affected = {"package": {"name": name, "ecosystem": "PyPI"}, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
        found = {"vulns": [{"id": f"GHSA-{name}", "affected": [affected]}]} if name in known else {}
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def osv() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Osv) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(importlib.util.find_spec("pip_audit") is None, reason="pip-audit is not installed")
def test_pip_audit_finds_what_a_service_reports(osv: str) -> None:
    packages = {"django": "1.2", "multidict": "7.2.1", "yarl": "1.25.1"}
    [found] = audit.vulnerabilities(audit.ask("osv", packages, ["--osv-url", osv]))
    assert str(found) == "multidict 7.2.1: GHSA-multidict, fixed in 999"
    assert found.fails
