"""A fake OpenAI-compatible server whose answers a test chooses, in threads."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Body = dict[str, object]
#: Pieces of a stream, or a status and its body.
Reply = Iterable[bytes] | tuple[int, object]

#: A piece after which the connection is cut.
CUT = b"\x00cut"
MODELS = {"/v1/models": (200, {"object": "list", "data": [{"id": "tiny"}]}), "/version": (200, {"version": "7"})}


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def token(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = event(b"[DONE]")


def completion(texts: Sequence[str], *, prompt_tokens: int = 5) -> list[bytes]:
    """A complete stream with one token per text."""
    *first, last = texts
    return [*map(token, first), token(last, "length"), usage(prompt_tokens, len(texts)), DONE]


def as_requested(body: Body) -> Reply:
    """A completion of `max_tokens` tokens, whose usage counts the tokens or words of the prompt."""
    prompt = body.get("prompt", "")
    assert isinstance(prompt, (str, list))
    assert isinstance(body["max_tokens"], int)
    num_prompt_tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    return completion(["x"] * body["max_tokens"], prompt_tokens=num_prompt_tokens)


@dataclass
class FakeServer:
    """The answers of the server, and the requests it received."""

    reply: Callable[[Body], Reply] = as_requested
    pages: dict[str, tuple[int, object]] = field(default_factory=lambda: dict(MODELS))
    tokenize: Callable[[Body], tuple[int, object]] = lambda _: (404, {})
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    base_url: str = ""

    @property
    def port(self) -> int:
        return int(self.base_url.rsplit(":", 1)[1])


class _Server(ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = True

    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that have left, as they do after an error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(*self.server.fake.pages.get(self.path, (404, {"error": {"message": f"no {self.path}"}})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._answer(*self.server.fake.tokenize(body))
            return
        self.server.fake.bodies.append(body)
        self.server.fake.headers.append(dict(self.headers))
        reply = self.server.fake.reply(body)
        if isinstance(reply, tuple):
            self._answer(*reply)
        else:
            self._stream(reply)

    def _stream(self, pieces: Iterable[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            if piece == CUT:
                self.close_connection = True
                return
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, value: object) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    with _Server(server) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.base_url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
