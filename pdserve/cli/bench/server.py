"""Requests to the server before a benchmark starts: its models, its version, and token ids of texts."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from pdserve.base.errors import NotFound, PdserveError, SetupError
from pdserve.cli.router_client import error_message, unreachable

_TIMEOUT_S = 60.0
_SHOWN_BYTES = 200

Answer = TypeVar("Answer", bound=BaseModel)


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _Tokens(BaseModel):
    tokens: list[int]


class _Version(BaseModel):
    version: str


class Server:
    """An OpenAI-compatible server; each request opens a connection."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._base_url = base_url
        self._headers = {"Content-Type": "application/json", **headers}

    def model(self, wanted: str | None) -> str:
        """Name of the model to use: `wanted`, or the server's first.

        A server that does not list its models is assumed to have the wanted one. Raises `PeerLost` when the server
        cannot be reached and `SetupError` when it has no such model.
        """
        try:
            names = [model.id for model in self._parse("/v1/models", self._send("/v1/models"), _Models).data]
        except NotFound:
            names = []
        if wanted is not None and (not names or wanted in names):
            return wanted
        if wanted is None and names:
            return names[0]
        known = f"its models: {', '.join(names)}" if names else "it lists none: give one with --model"
        raise SetupError(f"{self._base_url} has no model {wanted or 'to choose'}; {known}.")

    def version(self) -> str | None:
        """Version of the server; None if it does not report one."""
        try:
            return self._parse("/version", self._send("/version"), _Version).version
        except PdserveError:
            return None

    def tokenize(self, text: str, model: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises `PdserveError` when the server cannot tokenize.

        Servers name the text `prompt` (vLLM, pdserve) or `content` (llama.cpp).
        """
        bodies = (
            {"model": model, "prompt": text, "add_special_tokens": False},
            {"content": text, "add_special": False},
        )
        for body in bodies:
            try:
                tokens = self._parse("/tokenize", self._send("/tokenize", body), _Tokens).tokens
            except PdserveError:
                continue
            if tokens:
                return tokens
        raise PdserveError(f"{self._base_url} has no /tokenize.")

    def _parse(self, path: str, body: bytes, model: type[Answer]) -> Answer:
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise PdserveError(f"{self._base_url}{path} sent an unexpected answer: {body[:_SHOWN_BYTES]!r}.") from error

    def _send(self, path: str, body: Mapping[str, object] | None = None) -> bytes:
        """Sends GET, or POST with a body; returns the body of the answer."""
        url = urlsplit(self._base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=_TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if data is None else "POST", url.path + path, data, self._headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise unreachable(self._base_url, error) from error
        finally:
            connection.close()
        if status == http.client.NOT_FOUND:
            raise NotFound(f"{self._base_url} has no {path}.")
        if status != http.client.OK:
            raise PdserveError(f"{self._base_url}{path} answered {status}: {error_message(answer) or 'no explanation'}")
        return answer
