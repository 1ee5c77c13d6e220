"""Compares what a router does with its OpenAPI document: answers with their schemas, bodies with what it allows."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]


class Description:
    """An OpenAPI document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self._validators: dict[str, Draft202012Validator] = {}

    @cached_property
    def operations(self) -> dict[tuple[str, str], Schema]:
        """Operations by method and path."""
        paths = self.document["paths"]
        return {(method.upper(), path): each for path, item in paths.items() for method, each in item.items()}

    @cached_property
    def _closed(self) -> Schema:
        """The components, where objects have no other members than those that are described."""
        return _closed(copy.deepcopy(self.document["components"]))

    def find(self, method: str, path: str) -> tuple[str, str] | None:
        """The operation that answers a request to this path without its query; None: there is none."""
        method = "GET" if method == "HEAD" else method
        for known, template in self._patterns:
            if known[0] == method and template.fullmatch(path):
                return known
        return None

    @cached_property
    def _patterns(self) -> list[tuple[tuple[str, str], re.Pattern[str]]]:
        # Names of models may contain slashes. A path without a parameter comes first.
        ordered = sorted(self.operations, key=lambda each: "{" in each[1])
        return [
            (known, re.compile("".join(_pattern(piece) for piece in re.split(r"(\{\w+\})", known[1]))))
            for known in ordered
        ]

    def body_errors(self, path: str, body: object) -> list[str]:
        """Why the document forbids this body; empty: it allows it."""
        schema = self.operations["POST", path]["requestBody"]["content"]["application/json"]["schema"]
        return [error.message for error in self._validator(schema, is_closed=False).iter_errors(body)]

    def check(self, known: tuple[str, str], status: int, headers: Mapping[str, str], content: bytes) -> None:
        """Raises `AssertionError` for an answer that the document does not describe."""
        responses = self.operations[known]["responses"]
        assert str(status) in responses, f"{known} does not describe status {status}: {content[:300]!r}"
        response = self._resolved(responses[str(status)])
        for name in ("X-Request-Id", "Retry-After", "WWW-Authenticate", "Location", "ETag"):
            assert name not in headers or name in response.get("headers", {}), f"{known} {status}: header {name}"
        self._check_headers(response, headers, f"{known} {status}")
        media = headers.get("Content-Type", "").partition(";")[0]
        if status in (304, 308):
            return
        contents = response["content"]
        assert media in contents or "*/*" in contents, f"{known} {status}: {media!r} is not described"
        if media == "application/json":
            self.check_value(contents[media]["schema"], json.loads(content), f"{known} {status}")
        elif media == "application/x-ndjson":
            for line in content.splitlines():
                self.check_value(contents[media]["schema"], json.loads(line), f"{known} {status} line")
        elif media == "text/event-stream":
            for data in events_of(content):
                self.check_value(contents[media]["schema"], data, f"{known} {status} event")

    def check_value(self, schema: Schema, value: object, where: str) -> None:
        """Raises `AssertionError` for a value that the schema does not describe."""
        errors = [*self._validator(schema, is_closed=True).iter_errors(value)]
        assert not errors, f"{where}: {errors[0].message[:600]} at {errors[0].json_path} ({len(errors)} errors)"

    def _check_headers(self, response: Schema, headers: Mapping[str, str], where: str) -> None:
        for name, described in response.get("headers", {}).items():
            if name in headers:
                schema = self._resolved(described)["schema"]
                value = int(headers[name]) if schema.get("type") == "integer" else headers[name]
                self.check_value(schema, value, f"{where} header {name}")

    def _resolved(self, value: Schema) -> Schema:
        if "$ref" not in value:
            return value
        found: Any = self.document
        for name in value["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        resolved: Schema = found
        return resolved

    def _validator(self, schema: Schema, *, is_closed: bool) -> Draft202012Validator:
        key = f"{is_closed} {json.dumps(schema, sort_keys=True)}"
        if key not in self._validators:
            components = self._closed if is_closed else self.document["components"]
            own = _closed(copy.deepcopy(schema)) if is_closed else schema
            self._validators[key] = Draft202012Validator({"allOf": [own], "components": components})
        return self._validators[key]


def events_of(stream: bytes) -> list[object]:
    """The JSON of server-sent events, without the `[DONE]` behind them."""
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for index, line in enumerate(lines, 1) if (index, line) != (len(lines), "[DONE]")]


def _pattern(piece: str) -> str:
    return (".+" if piece == "{name}" else "[^/]+") if piece.startswith("{") else re.escape(piece)


def _closed(schema: Any) -> Any:
    """The schema without room for members that it does not name."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
