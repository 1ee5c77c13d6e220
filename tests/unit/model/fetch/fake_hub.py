"""A model hub on this machine: what the hub's client asks for, with files that can break off and resume."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

COMMIT, OLDER = "1" * 40, "2" * 40


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@dataclass
class FakeHub:
    """One repository, `org/name`. Files that end in `.safetensors` are large ones, known by their SHA-256."""

    files: dict[str, bytes]
    url: str = ""
    #: Commits of branches and tags, and files of commits other than the newest.
    revisions: dict[str, str] = field(default_factory=dict)
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)
    #: What is sent instead of a file's content.
    sent: dict[str, bytes] = field(default_factory=dict)
    #: Bytes after which the connection of a file's next download is closed.
    breaks_off: dict[str, int] = field(default_factory=dict)
    #: The repository is gated: only for who sends this token.
    token: str | None = None
    #: First bytes of downloads, by file.
    offsets: dict[str, list[int]] = field(default_factory=dict)

    def answer(self, path: str, authorization: str | None) -> tuple[bytes, dict[str, str], int] | None:
        """Body, headers and status of a request that is not for a file."""
        if self.token is not None and authorization != f"Bearer {self.token}":
            return b"", {"X-Error-Code": "GatedRepo"}, 403
        if not path.startswith(("/api/models/org/name", "/org/name/")):
            return b"", {"X-Error-Code": "RepoNotFound"}, 404
        if tree := re.match(r"/api/models/org/name/tree/(\w+)", path):
            return json.dumps(self.tree(tree[1])).encode(), {}, 200
        if named := re.match(r"/api/models/org/name/revision/([\w.%-]+)", path):
            commit = {"main": COMMIT, COMMIT: COMMIT, **self.revisions}.get(unquote(named[1]))
            if commit is None:
                return b"", {"X-Error-Code": "RevisionNotFound"}, 404
            return json.dumps({"id": "org/name", "sha": commit}).encode(), {}, 200
        if path.startswith("/api/"):
            return json.dumps({"id": "org/name", "sha": COMMIT}).encode(), {}, 200
        return None

    def at(self, commit: str) -> dict[str, bytes]:
        """The files of a commit."""
        return self.files if commit == COMMIT else self.older[commit]

    def tree(self, commit: str) -> list[dict[str, object]]:
        """The answer to a question for all files."""
        found: list[dict[str, object]] = []
        for name, content in self.at(commit).items():
            entry: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
            entry["oid"] = git_blob_id(content)
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
            found.append(entry)
        return found


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        answer = self.hub.answer(self.path, self.headers.get("Authorization"))
        if answer is not None:
            body, headers, status = answer
            self._send(body, headers, status=status)
        else:
            match = re.fullmatch(r"/org/name/resolve/(\w{40})/(.+)", self.path)
            assert match is not None, self.path
            self._answer_file(match[1], match[2], with_body=with_body)

    def _answer_file(self, commit: str, name: str, *, with_body: bool) -> None:
        files = self.hub.at(commit)
        if name not in files:
            self.send_error(404)
            return
        content = self.hub.sent.get(name, files[name])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"'}
        if not with_body:
            self._send(b"", {**headers, "Content-Length": str(len(content))})
            return
        self._send_file(name, content, headers)

    def _send_file(self, name: str, content: bytes, headers: dict[str, str]) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        self.hub.offsets.setdefault(name, []).append(first)
        headers["Content-Length"] = str(len(content) - first)
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._send(content[first : self.hub.breaks_off.pop(name, len(content))], headers, status=206 if first else 200)
        self.close_connection = True

    def _send(self, body: bytes, headers: dict[str, str], *, status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves the hub; its `url` is set."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
