"""What a benchmark asks the server before it begins: its models, its version, and token ids of texts."""

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
    """An OpenAI-compatible server; one connection a question."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._base_url = base_url
        self._headers = {"Content-Type": "application/json", **headers}

    def model(self, wanted: str | None) -> str:
        """The name of the model to ask: `wanted`, or the first there is.

        Raises `PeerLost` when the server cannot be reached and `SetupError` when it has no such model. A server that
        does not tell its models is believed to have the wanted one.
        """
        try:
            names = [model.id for model in self._parse("/v1/models", self._ask("/v1/models"), _Models).data]
        except NotFound:
            names = []
        if wanted is not None and (not names or wanted in names):
            return wanted
        if wanted is None and names:
            return names[0]
        known = f"it has {', '.join(names)}" if names else "it does not say which it has: give --model"
        raise SetupError(f"{self._base_url} has no model {wanted or 'to choose'}; {known}.")

    def version(self) -> str | None:
        """The version of the server, as far as it tells."""
        try:
            return self._parse("/version", self._ask("/version"), _Version).version
        except PdserveError:
            return None

    def tokenize(self, text: str, model: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises `PdserveError` when the server has no way to tell.

        Servers name the text `prompt` (vLLM, pdserve) or `content` (llama.cpp).
        """
        questions = (
            {"model": model, "prompt": text, "add_special_tokens": False},
            {"content": text, "add_special": False},
        )
        for question in questions:
            try:
                tokens = self._parse("/tokenize", self._ask("/tokenize", question), _Tokens).tokens
            except PdserveError:
                continue
            if tokens:
                return tokens
        raise PdserveError(f"{self._base_url} has no /tokenize.")

    def _parse(self, path: str, body: bytes, model: type[Answer]) -> Answer:
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise PdserveError(f"{self._base_url}{path} answers something else: {body[:_SHOWN_BYTES]!r}.") from error

    def _ask(self, path: str, question: Mapping[str, object] | None = None) -> bytes:
        """The body of GET, or of POST with a question."""
        parts = urlsplit(self._base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        try:
            body = None if question is None else json.dumps(question)
            connection.request("GET" if body is None else "POST", parts.path + path, body, self._headers)
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
