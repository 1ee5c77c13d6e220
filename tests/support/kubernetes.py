"""An API server of Kubernetes with the Secrets of one namespace, and what a pod knows about it."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.certificates import Authority

NAMESPACE = "ns"
PATH = f"/api/v1/namespaces/{NAMESPACE}/secrets"


@dataclass
class FakeKubernetes:
    """An API server with the Secrets of one namespace."""

    port: int = 0
    #: Data of Secrets by name.
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Method, path, headers and body of each request.
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    #: Requests that are refused, each with this status.
    refusals: list[int] = field(default_factory=list)
    #: Whether the connection is closed instead of the next answer.
    loses_an_answer: bool = False

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        if self.refusals:
            return self.refusals.pop(0), {"kind": "Status", "message": "secrets is forbidden: User cannot create"}
        if method == "POST" and path == PATH:
            name = body["metadata"]["name"]
            if name in self.secrets:
                return 409, {"kind": "Status", "message": f'secrets "{name}" already exists'}
            self.secrets[name] = body["data"]
            return 201, body
        data = self.secrets.get(path.removeprefix(f"{PATH}/"))
        return (404, {"kind": "Status", "message": "not found"}) if data is None else (200, {"data": data})


@contextmanager
def running_kubernetes(authority: Authority) -> Iterator[FakeKubernetes]:
    kubernetes = FakeKubernetes()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parsed = json.loads(body) if body else None
            kubernetes.requests.append((self.command, self.path, dict(self.headers), parsed))
            status, answer = kubernetes.answer(self.command, self.path, parsed)
            if kubernetes.loses_an_answer:
                kubernetes.loses_an_answer = False
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - names that the library calls

        def log_message(self, format: str, *args: object) -> None:
            """Not on standard error."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that trusts another authority breaks off, which is no output of a test."""

    server = Server(("127.0.0.1", 0), Handler)
    settings = authority.sign("kubernetes")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert settings.peer_ssl_certfile is not None
    context.load_cert_chain(settings.peer_ssl_certfile, settings.peer_ssl_keyfile)
    # The handshake in the request's own thread, so that a client that breaks it off ends nothing.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    kubernetes.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield kubernetes
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_account(directory: Path, authority: Authority) -> Path:
    """What Kubernetes mounts into a pod."""
    directory.mkdir(exist_ok=True)
    (directory / "namespace").write_text(NAMESPACE)
    (directory / "token").write_text("the-token\n")
    (directory / "ca.crt").write_bytes(authority.certificate.read_bytes())
    return directory
