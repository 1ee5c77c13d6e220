"""Values by which clients of several servers request nothing mean what the documented table says, field by field."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import RequestError
from router_svc.api.body import Body
from router_svc.api.fields import IGNORED, UNSUPPORTED
from router_svc.api.ids import Ids
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.parse import parse_body
from router_svc.api.sampling_defaults import SamplingDefaults
from router_svc.api.served_model import ServedModel
from tests.arch.documents import section, table_rows

#: As the table writes them. Null is the same everywhere, and has no column.
VALUES = ("false", "0", "-1", '""', "[]", "{}")
Make = Callable[[Any, ServedModel, Ids, int], Awaitable[GenerationRequest]]
ENDPOINTS: dict[str, tuple[type[Body], Make, dict[str, object]]] = {
    "completions": (CompletionBody, completion_request, {"prompt": "x"}),
    "chats": (ChatBody, chat_request, {"messages": [{"role": "user", "content": "x"}]}),
}
REQUIRED = {"model", "prompt", "messages"}


#: A model whose files have defaults, so that a field which switches one off differs from none.
DEFAULTS = SamplingDefaults(
    temperature=0.5, top_p=0.5, top_k=20, min_p=0.125, repetition_penalty=1.25, min_new_tokens=2, stop_strings=("END",)
)
#: Longer than the context with `max_tokens`: a prompt that is truncated differs from one that is refused.
LONG = "x" * 90


@pytest.fixture
def model(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    monkeypatch.setattr(secrets, "randbits", lambda _: 7)
    return replace(ServedModel.load(model_dir, "tiny"), defaults=DEFAULTS)


async def _request(endpoint: str, field: str, given: dict[str, object], model: ServedModel) -> GenerationRequest | None:
    """What the router makes of a request with these fields, of which `field` is tried; None: an error."""
    cls, make, prompt = ENDPOINTS[endpoint]
    is_long = field == "truncate_prompt_tokens"
    if is_long:
        prompt = {name: json.loads(json.dumps(value).replace("x", LONG)) for name, value in prompt.items()}
    try:
        body = parse_body(cls, json.dumps({"model": "tiny", **prompt, **given}).encode())
        made = await make(body, model, Ids(prefix="", header="r"), 64 if is_long else 100)
    except RequestError:
        return None
    return replace(made, created=0)


def _documented() -> dict[tuple[str, str], tuple[set[str], set[str]]]:
    """The values that request nothing, and those with a meaning, by endpoint and field."""
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for fields, endpoints, nothing, meaning in table_rows(section("docs/http-api.md", "Fields that request nothing")):
        for field in fields.replace("`", "").split():
            for endpoint in ENDPOINTS if endpoints == "both" else [endpoints]:
                found[endpoint, field] = set(nothing.replace("`", "").split()), set(meaning.replace("`", "").split())
    return found


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_each_value_requests_nothing_or_something_or_is_refused_as_documented(
    endpoint: str, model: ServedModel
) -> None:
    fields = ({*ENDPOINTS[endpoint][0].model_fields} | {*UNSUPPORTED}) - REQUIRED
    found = {}
    for field in fields:
        absent = await _request(endpoint, field, {}, model)
        assert await _request(endpoint, field, {field: None}, model) == absent, f"{field}: null"
        made = {text: await _request(endpoint, field, {field: json.loads(text)}, model) for text in VALUES}
        if kept := {text for text, request in made.items() if request is not None}:
            nothing = {text for text in kept if made[text] == absent}
            found[endpoint, field] = nothing, kept - nothing
    assert found == {key: values for key, values in _documented().items() if key[0] == endpoint}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_fields_without_effect_take_any_value(endpoint: str, model: ServedModel) -> None:
    absent = await _request(endpoint, "", {}, model)
    for field in IGNORED:
        for text in VALUES:
            assert await _request(endpoint, field, {field: json.loads(text)}, model) == absent, f"{field}: {text}"
