"""`pdserve trace`: where a request's time went, and what was decided for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from rich.console import Console

from pdserve.base.config import load, option
from pdserve.base.errors import SetupError
from pdserve.cli.router_client import DEFAULT_BASE_URL, get, get_model, normal_base_url
from pdserve.cli.trace_view import RequestTrace, render


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What `pdserve trace` needs to know."""

    request_id: str = option("", help="id of the request: `id` of its answer", metavar="REQUEST_ID", positional=True)
    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")
    json: bool = option(False, help="print the record as the router answers it")


def main(argv: Sequence[str]) -> int:
    """Draws one request's phases."""
    config = load(TraceConfig, "trace", argv, description=__doc__)
    if not config.request_id:
        raise SetupError("Which request? Give the `id` of its answer: pdserve trace REQUEST_ID.")
    base_url = normal_base_url(config.base_url)
    path = f"/v1/requests/{quote(config.request_id, safe='')}/trace"
    if config.json:
        print(get(base_url, path).decode())
        return 0
    console = Console(highlight=False)
    console.print(render(get_model(base_url, path, RequestTrace), width=console.width))
    return 0
