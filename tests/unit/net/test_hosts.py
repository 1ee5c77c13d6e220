"""A listener on loopback answers to its own names only."""

from __future__ import annotations

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from pdserve.base.errors import Forbidden
from pdserve.net.admin import Health, bound_socket, serve_admin
from pdserve.net.hosts import AllowedHosts, parse_origins


@pytest.mark.parametrize(
    "header", ["localhost", "localhost:8000", "LOCALHOST.:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.7.4:8000"]
)
def test_the_own_name_and_addresses_are_taken(header: str) -> None:
    AllowedHosts.of_listener("127.0.0.1").check([header])


@pytest.mark.parametrize(
    "header",
    [
        "rebound.example",
        "rebound.example:8000",
        "localhost.rebound.example",
        "127.0.0.1.rebound.example",
        "rebound.example@localhost",
        "localhost/x",
        "localhost, rebound.example",
        "",
    ],
)
@pytest.mark.parametrize("listener", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_another_name_is_refused_on_loopback(listener: str, header: str) -> None:
    with pytest.raises(Forbidden, match="--allowed-hosts"):
        AllowedHosts.of_listener(listener).check([header])


def test_a_second_header_does_not_hide_behind_the_first() -> None:
    with pytest.raises(Forbidden):
        AllowedHosts.of_listener("127.0.0.1").check(["localhost", "rebound.example"])


def test_names_are_free_on_other_addresses_unless_some_are_named() -> None:
    AllowedHosts.of_listener("0.0.0.0").check(["any.example"])
    named = AllowedHosts.of_listener("0.0.0.0", ["llm.example.com"])
    named.check(["LLM.example.com:443"])
    with pytest.raises(Forbidden):
        named.check(["any.example"])
    AllowedHosts.of_listener("127.0.0.1", ["*"]).check(["any.example"])


@pytest.mark.parametrize("text", ['["https://a.example", "https://b.example"]', "https://a.example,https://b.example"])
def test_origins_are_a_json_list_or_words(text: str) -> None:
    assert parse_origins(text) == ("https://a.example", "https://b.example")
    with pytest.raises(ValueError, match="not a list of origins"):
        parse_origins("[1]")


async def test_a_page_whose_name_was_rebound_cannot_read_a_workers_metrics() -> None:
    listener = bound_socket("127.0.0.1", 0, flag="--http-port")
    async with (
        serve_admin(Health(), CollectorRegistry(), listener) as address,
        aiohttp.ClientSession() as http,
        http.get(f"http://{address}/metrics", headers={"Host": "rebound.example"}) as response,
    ):
        assert response.status == 403
