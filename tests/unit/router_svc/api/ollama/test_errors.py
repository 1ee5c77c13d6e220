"""Errors in Ollama's form: a text, with the names of this API."""

from __future__ import annotations

import json

import pytest
from aiohttp.test_utils import make_mocked_request

from pdserve.base.errors import (
    Cancelled,
    NotFound,
    NoWorkers,
    Overloaded,
    PdserveError,
    RequestError,
    TooLarge,
    codes_of,
)
from router_svc.api.ollama.errors import CHAT_NAMES, GENERATE_NAMES, error_response, in_own_words


def test_an_error_is_a_text_with_the_status_of_other_apis() -> None:
    for error in (PdserveError("x"), RequestError("x"), NotFound("x"), TooLarge("x"), Cancelled("x"), NoWorkers("x")):
        response = error_response(error, make_mocked_request("POST", "/api/chat"))
        assert response.status == codes_of(error).http
        assert isinstance(response.body, bytes)
        assert json.loads(response.body) == {"error": "x"}
    overloaded = error_response(Overloaded("x", retry_after_s=3), make_mocked_request("POST", "/api/chat"))
    assert overloaded.headers["Retry-After"] == "3"


@pytest.mark.parametrize(
    ("path", "error", "is_explained"),
    [
        ("/api/pull", NotFound("x."), True),
        ("/api/blobs/sha256:00", NotFound("x."), True),
        ("/api/other", NotFound("x."), False),
        ("/api/pull", PdserveError("x."), False),
    ],
)
def test_paths_that_manage_models_say_what_to_do(path: str, error: PdserveError, is_explained: bool) -> None:
    response = error_response(error, make_mocked_request("POST", path))
    assert isinstance(response.body, bytes)
    text = json.loads(response.body)["error"]
    assert text.startswith("x.")
    assert ("pdserve up MODEL" in text) == is_explained


def test_texts_name_the_fields_of_this_api() -> None:
    text = "`response_format.json_schema.schema.not` and `messages`"
    for names, own in ((CHAT_NAMES, "`format.not` and `messages`"), (GENERATE_NAMES, "`format.not` and `prompt`")):
        with pytest.raises(RequestError) as raised, in_own_words(names):
            raise RequestError(text, param="x")
        assert (str(raised.value), raised.value.param) == (own, "x")
