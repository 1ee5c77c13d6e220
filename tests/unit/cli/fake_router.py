"""A fake router that answers over HTTP, in a thread."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeRouter:
    """The answers of the router, and the requests it received."""

    pages: Mapping[str, tuple[int, object]] = field(default_factory=dict)
    #: Texts and other deltas streamed as an answer; "STALL" waits until the client has gone, and ends the answer.
    pieces: list[str | dict[str, object]] = field(default_factory=lambda: ["Hel", "lo"])
    finish_reason: str = "stop"
    #: Tokens of the answer as its usage reports them; the number of pieces if None.
    completion_tokens: int | None = None
    #: Status and body with which the first requests are refused, one each.
    refusals: list[tuple[int, object]] = field(default_factory=list)
    bodies: list[dict[str, object]] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)
    base_url: str = ""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, router: FakeRouter) -> None:
        self.router = router
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that have left, as they do after an error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    @property
    def _router(self) -> FakeRouter:
        return self.server.router

    def do_GET(self) -> None:
        self._answer(*self._router.pages.get(self.path, (404, {"error": {"message": f"There is no {self.path}."}})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._router.bodies.append(body)
        if self._router.refusals:
            self._answer(*self._router.refusals.pop(0))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        try:
            self._stream()
        except ConnectionError:
            self._router.disconnected.set()
            raise

    def _stream(self) -> None:
        for piece in self._router.pieces:
            if piece == "STALL":
                self.rfile.read(1)  # Returns when the client closes the connection.
                self._router.disconnected.set()
                return
            if isinstance(piece, str) and piece.startswith("ERROR "):
                self._event({"error": {"message": piece.removeprefix("ERROR ")}})
            else:
                delta = {"content": piece} if isinstance(piece, str) else piece
                self._event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta}]})
        finish = {"index": 0, "delta": {}, "finish_reason": self._router.finish_reason}
        self._event({"id": "chatcmpl-1", "choices": [finish]})
        completion_tokens = self._router.completion_tokens or len(self._router.pieces)
        self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": completion_tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: object) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, status: int, value: object) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running(router: FakeRouter) -> Iterator[FakeRouter]:
    with _Server(router) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        router.base_url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield router
        finally:
            server.shutdown()
            thread.join()
