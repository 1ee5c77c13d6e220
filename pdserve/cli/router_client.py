"""A small HTTP client of the router that imports quickly, for commands that send one request."""

from __future__ import annotations

import http.client
import json
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from pdserve.base.api_key import KEY_VARIABLE, bearer
from pdserve.base.errors import NotFound, PdserveError, PeerLost, SetupError, Unauthorized

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0

Model = TypeVar("Model", bound=BaseModel)


def normal_base_url(text: str) -> str:
    """Normalizes an address to `http://host:port`. The scheme may be missing; a final slash or `/v1` is removed."""
    url = text if "://" in text else f"http://{text}"
    try:
        address = urlsplit(url)
        address.port  # noqa: B018  reading it checks it
    except ValueError as error:
        raise SetupError(f"{text!r} is not an address such as {DEFAULT_BASE_URL}: {error}.") from error
    if address.scheme not in ("http", "https") or not address.hostname:
        raise SetupError(f"{text!r} is not an address such as {DEFAULT_BASE_URL}.")
    return url.rstrip("/").removesuffix("/v1")


def get(base_url: str, path: str, api_key: str | None = None) -> bytes:
    """The body of `GET path`, with this API key or else the environment's.

    Raises `PeerLost` without an answer, `NotFound`, `Unauthorized`, or `PdserveError` for other refusals. Proxies are
    not used: the router is close by, and a proxy that cannot reach it would hide the cause.
    """
    address = urlsplit(base_url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(address.hostname or "", address.port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", address.path + path, headers={"Accept": "application/json", **bearer(api_key)})
            response = connection.getresponse()
            status, body = response.status, response.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise unreachable(base_url, error) from error
    if status == http.client.NOT_FOUND:
        raise NotFound(error_message(body) or f"{base_url} has no {path}.")
    if status == http.client.UNAUTHORIZED:
        raise Unauthorized(f"{base_url} refuses: {error_message(body)} Give a key with --api-key or {KEY_VARIABLE}.")
    if status >= http.client.BAD_REQUEST:
        raise PdserveError(f"{base_url}{path} answered {status}: {error_message(body) or 'no explanation'}")
    return body


def get_model(base_url: str, path: str, model: type[Model], api_key: str | None = None) -> Model:
    """The parsed answer of `GET path`. Raises what `get` raises, and `PdserveError` when it cannot be parsed."""
    return parse(get(base_url, path, api_key), model, base_url + path)


def parse(body: bytes, model: type[Model], url: str) -> Model:
    """Parses the body that `url` answered. Raises `PdserveError` when it is not a `model`."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise PdserveError(f"{url} does not answer like a pdserve router: {where}: {first['msg']}.") from error


def unreachable(base_url: str, error: Exception) -> PeerLost:
    """The error for a router that does not answer."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return PeerLost(
        f"Cannot reach {base_url}: {reason}. Is `pdserve up` running? Give another address with --base-url."
    )


def error_message(body: bytes) -> str:
    """The message in an OpenAI-style error body; empty when there is none."""
    try:
        content = json.loads(body)
    except ValueError:
        return ""
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def error_param(body: bytes) -> str:
    """The request field that an OpenAI-style error body names; empty when there is none."""
    try:
        param = json.loads(body)["error"]["param"]
    except (ValueError, LookupError, TypeError):
        return ""
    return param if isinstance(param, str) else ""
