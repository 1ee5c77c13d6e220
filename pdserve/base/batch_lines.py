"""The lines of a batch, in the form of OpenAI's Batch API and of vLLM's `run-batch`: requests, and their results."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.base.errors import RequestError
from pdserve.base.json_lines import on_one_line

#: The endpoints whose requests a batch may have.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_CUSTOM_ID_CHARACTERS = 512
#: Ids of results start with it.
RESULT_PREFIX = "batch_req_"
_MAX_SHOWN = 100


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: Annotated[str, MinLen(1), MaxLen(MAX_CUSTOM_ID_CHARACTERS)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class _Result(BaseModel):
    custom_id: str
    response: Any
    error: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of a batch."""

    #: Unique within the batch.
    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(line: bytes) -> BatchLine:
    """The request of a line. Raises `RequestError`, which says what is wrong with it."""
    try:
        found = _Input.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"{where}: {first['msg']}." if where else f"It is not JSON: {first['msg']}.") from None
    if found.url not in ENDPOINTS:
        raise RequestError(f"url: {found.url[:_MAX_SHOWN]!r} is not one of {', '.join(ENDPOINTS)}.")
    for name in ("stream", "background"):
        if found.body.get(name):
            raise RequestError(f"body.{name}: Results of a batch are whole. Leave it out.")
    return BatchLine(custom_id=found.custom_id, url=found.url, body=found.body)


def result_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The line of a request that was answered. `body`: JSON, in which line breaks can only be between its tokens."""
    head = {"id": RESULT_PREFIX + secrets.token_hex(12), "custom_id": custom_id}
    answer = {"status_code": status, "request_id": request_id}
    return b'%b, "response": %b, "body": %b}, "error": null}\n' % (
        on_one_line(json.dumps(head, ensure_ascii=False).encode())[:-1],
        json.dumps(answer).encode()[:-1],
        on_one_line(body).replace(b"\n", b" ").replace(b"\r", b" ").strip(),
    )


def custom_id_of(line: bytes) -> str | None:
    """Which request a line is the result of; None: it is no result."""
    try:
        return _Result.model_validate_json(line).custom_id
    except ValidationError:
        return None
