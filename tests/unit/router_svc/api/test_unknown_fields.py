"""Unknown fields are refused, or ignored and named in a header: never ignored in silence."""

from __future__ import annotations

import json
from typing import ClassVar

import aiohttp
import pytest
from aiohttp import web

from pdserve.base.errors import RequestError
from pdserve.net.admin import bound_socket, serve_http
from router_svc.api.body import Body
from router_svc.api.http_app import HttpRules, make_app
from router_svc.api.http_request import IGNORED_FIELDS_HEADER, read_body
from router_svc.api.intake import Intake
from router_svc.api.openai.schema import ChatBody
from router_svc.api.parse import parse_body
from router_svc.api.text_threads import TextThreads

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class _Tolerant(Body):
    tolerates_unknown_fields: ClassVar[bool] = True

    x: int


def _chat(fields: dict[str, object]) -> ChatBody:
    return parse_body(ChatBody, json.dumps(CHAT | fields).encode(), tolerates_unknown_fields=True)


def test_unknown_fields_of_a_body_and_its_messages_are_ignored_by_name() -> None:
    messages = [{"role": "user", "content": "x", "id": 1}, {"role": "user", "content": "y", "id": 2, "annotations": []}]
    body = _chat({"beta": {"a": 1}, "messages": messages, "temperature": 0.5, "user": "me"})
    assert body.ignored_fields == ("beta", "messages[].id")
    assert [message.content for message in body.messages] == ["x", "y"]
    assert body.temperature == 0.5


def test_a_body_without_unknown_fields_has_none() -> None:
    assert _chat({}).ignored_fields == ()


@pytest.mark.parametrize("fields", [{"audio": {"voice": "x"}}, {"suffix": "x"}, {"functions": [{"name": "f"}]}])
def test_what_is_known_and_not_supported_is_still_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="not supported"):
        _chat(fields)


def test_a_value_that_is_wrong_is_still_refused() -> None:
    with pytest.raises(RequestError, match="`temperature`") as raised:
        _chat({"temperature": "hot", "beta": 1})
    assert raised.value.param == "temperature"
    with pytest.raises(RequestError, match="valid list"):
        _chat({"messages": {"role": "user"}})


def test_by_default_unknown_fields_are_refused() -> None:
    with pytest.raises(RequestError, match="Unknown field `beta`"):
        parse_body(ChatBody, json.dumps(CHAT | {"beta": 1}).encode())


async def test_a_header_names_them_safely_and_not_without_end() -> None:
    intake = Intake(TextThreads())

    async def post(request: web.Request) -> web.Response:
        return web.json_response({"x": (await read_body(request, _Tolerant, intake)).x})

    app = make_app([[web.post("/post", post)]], HttpRules(max_body_bytes=1 << 20))
    with bound_socket("127.0.0.1", 0, flag="--port") as listener:
        async with serve_http(app, listener) as address, aiohttp.ClientSession(f"http://{address}") as client:
            fields: dict[str, object] = {"x": 1, "a\r\nSet-Cookie: b": 1} | {
                f"f{index:03}" * 40: 1 for index in range(100)
            }
            async with client.post("/post", json=fields) as response:
                assert response.status == 200
                named = response.headers[IGNORED_FIELDS_HEADER]
                assert named.startswith("a__Set-Cookie__b, f000f000")
                assert named.endswith("and 69 more")
                assert len(named) < 4000
                assert "Set-Cookie" not in response.headers
            async with client.post("/post", json={"x": 1}) as response:
                assert IGNORED_FIELDS_HEADER not in response.headers
            # An error, too: what was ignored may be why.
            async with client.post("/post", json={"y": 1}) as response:
                assert response.status == 400
