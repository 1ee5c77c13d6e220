"""Errors in Anthropic's form: a type for each status, and the names of this API in their texts."""

from __future__ import annotations

import json

import pytest
from aiohttp.test_utils import make_mocked_request

from pdserve.base.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    Forbidden,
    MethodNotAllowed,
    NoFreeBlocks,
    NotFound,
    NoWorkers,
    Overloaded,
    PayloadTooLarge,
    PdserveError,
    PeerLost,
    Quarantined,
    QuotaExceeded,
    RequestError,
    StoreError,
    TooLarge,
    Unauthorized,
    error_classes,
)
from router_svc.api.anthropic.errors import error_response, in_own_words, status_of, type_of
from router_svc.api.served_model import require_fits


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (MethodNotAllowed("x"), 405, "invalid_request_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (PayloadTooLarge("x"), 413, "request_too_large"),
        (Quarantined("x"), 422, "invalid_request_error"),
        (Overloaded("x", retry_after_s=3), 429, "rate_limit_error"),
        (QuotaExceeded("x", retry_after_s=3), 429, "rate_limit_error"),
        (Cancelled("x"), 499, "invalid_request_error"),
        (PdserveError("x"), 500, "api_error"),
        (PeerLost("x"), 502, "api_error"),
        (StoreError("x"), 503, "api_error"),
        (DeadlineExceeded("x"), 504, "timeout_error"),
        (NoWorkers("x"), 529, "overloaded_error"),
        (NoFreeBlocks("x"), 529, "overloaded_error"),
        (Draining("x"), 529, "overloaded_error"),
    ],
)
def test_every_status_has_its_type(error: PdserveError, status: int, kind: str) -> None:
    response = error_response(error, make_mocked_request("POST", "/v1/messages"))
    assert response.status == status
    assert isinstance(response.body, bytes)
    assert json.loads(response.body) == {
        "type": "error",
        "error": {"type": kind, "message": "x"},
        "request_id": None,
    }
    # What the client is to wait is said as in other APIs.
    assert ("Retry-After" in response.headers) == (status in (429, 529))
    assert ("x-should-retry" in response.headers) == (status in (499, 504))


def test_every_error_has_a_type_that_clients_know() -> None:
    known = {"invalid_request_error", "authentication_error", "permission_error", "not_found_error"}
    known |= {"request_too_large", "rate_limit_error", "api_error", "timeout_error", "overloaded_error"}
    for cls in error_classes().values():
        error = cls.__new__(cls)
        Exception.__init__(error, "x")
        assert type_of(status_of(error)) in known


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("`tools[0].function.parameters.properties.a` fails.", "`tools[0].input_schema.properties.a` fails."),
        ("`response_format.json_schema.schema.not` fails.", "`output_config.format.schema.not` fails."),
        ("All is well.", "All is well."),
    ],
)
def test_texts_name_the_fields_of_this_api(text: str, own: str) -> None:
    with pytest.raises(RequestError) as raised, in_own_words():
        raise RequestError(text, param="x")
    assert str(raised.value) == own


def test_a_prompt_beyond_the_context_is_too_long_in_the_words_of_its_clients() -> None:
    with (
        pytest.raises(RequestError, match=r"^prompt is too long: 300 tokens > 256 maximum\. The prompt"),
        in_own_words(),
    ):
        require_fits(300, 256, param="messages")
