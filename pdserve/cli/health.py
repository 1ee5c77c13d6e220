"""`pdserve health`: asks a router or worker whether it is ready, for health checks of images without curl."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdserve.base.addresses import parse_host
from pdserve.base.config import load, option, positional
from pdserve.base.errors import SetupError

_DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Settings of `pdserve health`."""

    url: str = positional(
        _DEFAULT_URL, help="address of the router or worker; the host auto is this host's own address", metavar="URL"
    )
    live: bool = option(False, help="ask /livez, whether it works, instead of /readyz, whether it takes requests")
    timeout_s: float = option(4.0, help="seconds to wait for the answer", minimum=0.1)


def main(argv: Sequence[str]) -> int:
    """Prints the state; returns 0 if it is the one asked for, else 1. Raises `SetupError` for a URL that is none."""
    config = load(HealthConfig, "health", argv, description=__doc__)
    path = "/livez" if config.live else "/readyz"
    try:
        status, body = _get(config.url, path, config.timeout_s)
    except (OSError, http.client.HTTPException) as error:
        print(f"{config.url} does not answer: {error or type(error).__name__}", file=sys.stderr)
        return 1
    print(_described(body) or f"{config.url}{path} answered {status}")
    return 0 if status == http.client.OK else 1


def _get(url: str, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of `GET url + path`. Raises `SetupError`, and what the connection raises."""
    text = url if "://" in url else f"http://{url}"
    try:
        address = urlsplit(text)
        host, port = parse_host(address.hostname or ""), address.port
    except ValueError as error:
        raise SetupError(f"{url!r} is not an address such as {_DEFAULT_URL}: {error}.") from error
    if address.scheme not in ("http", "https") or not host:
        raise SetupError(f"{url!r} is not an address such as {_DEFAULT_URL}.")
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=timeout_s)
    try:
        connection.request("GET", address.path.rstrip("/") + path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _described(body: bytes) -> str:
    """`ready`, or `not_ready: loading`; empty when the body is not that of a health check."""
    try:
        content = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(content, dict) or "status" not in content:
        return ""
    reasons = [content.get("reason"), *(f"{what}: {why}" for what, why in (content.get("degraded") or {}).items())]
    return ": ".join([str(content["status"]), *filter(None, ["; ".join(filter(None, reasons))])])
