"""`pdserve trace`: shows where a request's time went and which decisions were made for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from rich.console import Console

from pdserve.base.config import load, option, positional
from pdserve.base.errors import SetupError
from pdserve.cli.router_client import DEFAULT_BASE_URL, get, get_model, normal_base_url
from pdserve.cli.trace_view import RequestTrace, render


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Settings of `pdserve trace`."""

    request_id: str = positional("", help="the `id` of the request's response", metavar="REQUEST_ID")
    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")
    api_key: str | None = option(None, help="API key; default: the variable PDSERVE_API_KEY", metavar="KEY")
    json: bool = option(False, help="print the router's JSON answer instead of a picture")


def main(argv: Sequence[str]) -> int:
    """Prints the decision record of one request. Raises `PdserveError`."""
    config = load(TraceConfig, "trace", argv, description=__doc__)
    if not config.request_id:
        raise SetupError("No request id given. Pass the `id` of a response: pdserve trace REQUEST_ID.")
    base_url = normal_base_url(config.base_url)
    path = f"/v1/requests/{quote(config.request_id, safe='')}/trace"
    if config.json:
        print(get(base_url, path, config.api_key).decode())
        return 0
    console = Console(highlight=False)
    console.print(render(get_model(base_url, path, RequestTrace, config.api_key), width=console.width))
    return 0
