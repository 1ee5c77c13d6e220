"""Bytes for an HTTP port: requests with odd headers, encodings and framing, whole, damaged and cut off."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from tests.fuzz.files.mutations import damaged_bytes
from tests.support.tiny_model import NAME

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "get", "QUERY", "A" * 300)
_BODY = json.dumps({"model": NAME, "prompt": "Say hello", "max_tokens": 14}).encode()
_CHAT = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
_NESTED = b"[" * 70 + b"]" * 70
BODIES = (_BODY, _CHAT, b'{"prompt": "x"}', b'{"tokens": [65]}', b"", b"{}", b"null", _NESTED, b"\xff\xfe{")
_JSON_HEADER = b"Content-Type: application/json"
#: Header lines that a server reads, and that are hard to understand.
ODD: Sequence[bytes] = (
    b"Host: localhost",
    b"Host: 127.0.0.1:80",
    b"Host: evil.example",
    b"Host: [::1]:8000",
    b"X-Request-Id: mine",
    b"X-Request-Id: ../../etc",
    b"X-Request-Id: \xff\xfe",
    b"X-Request-Id: " + b"a" * 200,
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"traceparent: 00-zz-\x80-01",
    b"Authorization: Bearer x",
    b"Authorization: Basic \xff",
    b"x-api-key: a\r\nx-api-key: b",
    b"Accept: application/openmetrics-text; version=1.0.0; q=abc",
    b"Accept: application/openmetrics-text; version=1.0.0; escaping=\xff",
    b"Accept: text/plain;;;=,,,",
    b"Last-Event-ID: 9f3c01aa-57",
    b"Last-Event-ID: 9f3c01aa-57x3.12e.56x5",
    b"Last-Event-ID: 9f3c01aa-" + b"1e." * 2000,
    b"Last-Event-ID: \xff-o9",
    b"If-None-Match: *",
    b'If-None-Match: W/"x", "y',
    b"If-None-Match: \xff",
    b"If-Modified-Since: Mon, 99 Foo 0000",
    b"Range: bytes=-1--5",
    b"Origin: https://a.example",
    b"Origin: null\r\nAccess-Control-Request-Method: POST",
    b"Origin: https://a.example\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: x\xff,y",
    b"Content-Type: application/json; charset=utf-16",
    b'Content-Type: application/json; charset=\xff; x="',
    b"Content-Type: text/plain",
    b"Content-Type: multipart/form-data; boundary=",
    b"Content-Encoding: gzip",
    b"Content-Encoding: identity",
    b"Content-Encoding: br",
    b"Content-Encoding: gzip, gzip",
    b"Expect: 100-continue",
    b"Expect: something",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk",
    b"Connection: keep-alive",
    b"Cookie: " + b"a=b; " * 500,
)
#: Header lines that no server may read. Some let a proxy and a server see different requests.
BROKEN: Sequence[bytes] = (
    b"Host: localhost\r\nHost: evil.example",
    b"Host:",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3",
    b"Transfer-Encoding:\x0bchunked",
    b"Content-Length: 0\r\nContent-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: +5",
    b"Content-Length: 1_0",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 20000000",
    b"X-Forwarded-For: 1.2.3.4, \x00",
    b"X-Long: " + b"a" * 9000,
    b": empty",
    b"No colon",
    b" Folded: x\r\n\tmore",
    b"Bad\x00Name: x",
    b"X-Bare: a\nX-Other: b",
)
TARGETS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    f"/v1/models/{NAME}",
    "/v1/models/%ff%00",
    "/v1/models/" + "a/" * 200,
    "/tokenize",
    "/detokenize",
    "/version",
    "/livez",
    "/readyz",
    "/health",
    "/metrics",
    "/metrics?name[]=a&name[]=%ff",
    "/v1/cluster",
    "/v1/requests",
    "/v1/requests?limit=5",
    "/v1/requests?limit=%D9%A3",
    "/v1/requests?limit=000000001" + "0" * 5000,
    "/v1/requests?limit=1&limit=-1&%zz",
    "/v1/usage",
    "/v1/usage?from=2026-11-01&to=2026-11-30&format=csv",
    "/v1/usage?from=0000-00-00",
    "/v1/usage?from=0001-01-01&to=9999-12-31",
    "/v1/usage?from=%D9%A3&to=&x[]=%ff",
    "/v1/requests/mine/stream",
    "/v1/requests/cmpl-mine/stream",
    "/v1/requests/%00/stream",
    "/v1/requests/cmpl-x/trace",
    "/v1/requests/cmpl-x:1/trace",
    "/v1/requests/%00/trace",
    "/v1/requests/" + "a" * 300 + "/trace",
    "/v1/requests/%2e%2e/trace",
    "/console",
    "/console/",
    "/console/main.js",
    "/console/..%2fpage.py",
    "/console/events",
    "/docs",
    "/docs/docs.js",
    "/docs/%5c..%5cindex.html",
    "/openapi.json",
    "http://localhost/version",
    "http://evil.example/version",
    "//evil.example/version",
    "/v1//models",
    "/version;a=b",
    "/%76ersion",
    "/versio\u00f1",
    "*",
    "localhost:443",
    "/?" + "a=b&" * 300,
    "/#/livez",
)
#: What other protocols start with.
STRANGERS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
    b"*1\r\n$4\r\nPING\r\n",
    b"\x05\x01\x00",
    b"GET /livez\r\n\r\n",
    b"\r\n\r\n\r\nGET /livez HTTP/1.0\r\n\r\n",
    b"GET /livez HTTP/9.9\r\n\r\n",
    b"GET /livez HTTP/1.1\nHost: localhost\n\n",
)


def request(method: str, target: str, headers: Sequence[bytes], body: bytes) -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {target} HTTP/1.1".encode("utf-8", "surrogateescape"), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def json_request(path: str, body: bytes) -> bytes:
    """A POST whose answer ends the connection."""
    headers = (b"Host: localhost", _JSON_HEADER, b"Content-Length: %d" % len(body), b"Connection: close")
    return request("POST", path, headers, body)


def get_request(target: str) -> bytes:
    """A GET whose answer ends the connection."""
    return request("GET", target, (b"Host: localhost", b"Connection: close"), b"")


def _chunked(body: bytes, random: Random) -> bytes:
    pieces, rest = [], body
    while rest:
        size = random.choice((1, 2, 7, 100, len(rest)))
        piece, rest = rest[:size], rest[size:]
        extension = random.choice((b"", b"", b";a=b", b';x="\r', b";" + b"y" * 50))
        pieces.append(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece))
    ends = (b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"", b"-1\r\n\r\n", b"ffffffffffffffffff\r\n", b"0\r\n")
    return b"".join(pieces) + random.choice(ends)


def _compressed(body: bytes, random: Random) -> tuple[bytes, bytes]:
    """A name and a body for Content-Encoding, which need not fit."""
    large = body if random.random() < 0.8 else b'{"prompt": "' + b"a" * random.choice((10_000, 3_000_000)) + b'"}'
    makers: Sequence[Callable[[bytes], bytes]] = (
        partial(gzip.compress, mtime=0),  # The time would make another input of the same seed.
        zlib.compress,
        lambda data: zlib.compress(data)[2:-4],
    )
    name = random.choice((b"gzip", b"deflate", b"gzip", b"deflate", b"br", b"zstd", b"x-unknown"))
    data = random.choice(makers)(large)
    return name, data[: random.choice((len(data), len(data), len(data) // 2))]


def odd_request(random: Random, *, is_last: bool = True) -> bytes:
    """One request. Each of its pieces is good more often than not, so that some get far."""
    target = random.choice(TARGETS)
    method = random.choice(METHODS) if random.random() < 0.2 else "POST" if target in TARGETS[:2] else "GET"
    if target in ("/tokenize", "/detokenize") and method == "GET":
        method = "POST"
    body = random.choice(BODIES) if method == "POST" or random.random() < 0.1 else b""
    headers = [b"Host: localhost"] if random.random() < 0.97 else []
    if method == "POST" and random.random() < 0.9:
        headers.append(_JSON_HEADER)
    odd = random.sample(ODD, random.choice((0, 0, 0, 1, 1, 2, 4)))
    for header in [*odd, *([random.choice(BROKEN)] if random.random() < 0.15 else [])]:
        name = header.partition(b":")[0]
        if random.random() < 0.8:  # A second header of a name is mostly refused.
            headers = [each for each in headers if each.partition(b":")[0] != name]
        headers.append(header)
    framing = random.random()
    if framing < 0.15:
        name, body = _compressed(body, random)
        headers += [b"Content-Encoding: " + name, b"Content-Length: %d" % len(body)]
    elif framing < 0.3:
        headers, body = [*headers, b"Transfer-Encoding: chunked"], _chunked(body, random)
    elif body and framing < 0.95:
        headers.append(b"Content-Length: %d" % len(body))
    if is_last and random.random() < 0.7:
        headers.append(b"Connection: close")
    random.shuffle(headers)
    return request(method, target, headers, body)


def connection(random: Random) -> bytes:
    """What a client sends over one connection."""
    if random.random() < 0.05:
        return random.choice(STRANGERS) + random.randbytes(random.choice((0, 10, 2000)))
    later = random.choice((0, 0, 0, 1, 2))
    data = b"".join(odd_request(random, is_last=index == later) for index in range(later + 1))
    chance = random.random()
    if chance < 0.25:
        return damaged_bytes(data, random)
    return data[: random.randrange(1, len(data) + 1)] if chance < 0.35 else data
