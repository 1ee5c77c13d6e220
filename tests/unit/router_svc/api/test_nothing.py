"""Values by which clients of several servers request nothing mean what the documented tables say, field by field."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.base.errors import RequestError
from router_svc.api.anthropic.schema import MessagesBody
from router_svc.api.body import Body
from router_svc.api.fields import IGNORED, UNSUPPORTED
from router_svc.api.generations import Endpoint, GenerationFactory
from router_svc.api.ids import Ids
from router_svc.api.ollama.embed_schema import OllamaEmbedBody
from router_svc.api.ollama.generation_api import _generate
from router_svc.api.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaOptions
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.parse import parse_body
from router_svc.api.pooling.embedding_request import embedding_request
from router_svc.api.pooling.pooled import PooledRequest, pooled_prompts
from router_svc.api.pooling.schema import EmbeddingBody, RerankBody, ScoreBody
from router_svc.api.responses.request import responses_request
from router_svc.api.responses.schema import ResponsesBody
from router_svc.api.sampling_defaults import SamplingDefaults
from router_svc.api.served_model import ServedModel
from tests.arch.documents import section, table_rows

#: As the tables write them. Null is the same everywhere, and has no column.
VALUES = ("false", "0", "-1", '""', "[]", "{}")
IDS = Ids(prefix="", header="r")
SECTION = "Fields that request nothing"
#: A model whose files have defaults, so that a field which switches one off differs from none.
DEFAULTS = SamplingDefaults(
    temperature=0.5, top_p=0.5, top_k=20, min_p=0.125, repetition_penalty=1.25, min_new_tokens=2, stop_strings=("END",)
)
#: Longer than the context with `max_tokens`: a prompt that is truncated differs from one that is refused.
LONG = "x" * 90
_ENDPOINT = Endpoint(name="/v1/any", prompt_param="input")
Make = Callable[[Any, ServedModel, int], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """An endpoint, and what the router makes of its bodies."""

    page: str
    body: type[Body]
    make: Make
    #: Fields that each request has.
    required: dict[str, object]
    #: An object in the body whose fields are tried, too.
    nested: tuple[str, type[Any]] | None = None


def _factory(model: ServedModel, context: int) -> GenerationFactory:
    return GenerationFactory(model=model, max_model_len=context, ids=IDS, endpoint=_ENDPOINT)


async def _chat(body: ChatBody, model: ServedModel, context: int) -> object:
    return await chat_request(body, _factory(model, context))


async def _completion(body: CompletionBody, model: ServedModel, context: int) -> object:
    return await completion_request(body, _factory(model, context))


async def _message(body: MessagesBody, model: ServedModel, context: int) -> object:
    made = await chat_request(body.chat, _factory(model, context), default_max_tokens=body.max_tokens)
    return replace(made, created=0), body.omits_thinking


async def _response(body: ResponsesBody, model: ServedModel, context: int) -> object:
    made = await responses_request(body, _factory(model, context))
    return replace(made, created=0), body.store is not False, body.previous_response_id


async def _ollama_chat(body: OllamaChatBody, model: ServedModel, context: int) -> object:
    return await chat_request(body.chat, _factory(model, context), default_max_tokens=body.max_tokens)


async def _ollama_generate(body: OllamaGenerateBody, model: ServedModel, context: int) -> object:
    return await _generate(body, _factory(model, context))


async def _embeddings(body: EmbeddingBody, model: ServedModel, context: int) -> object:
    pooled = await embedding_request(body, _backend(model, context), _ENDPOINT, IDS)
    return pooled.generations, body.encoding_format == "base64", bool(body.return_token_ids)


async def _ollama_embed(body: OllamaEmbedBody, model: ServedModel, context: int) -> object:
    cuts = body.truncate is not False
    pooled = await embedding_request(body.meant("tiny"), _backend(model, context), _ENDPOINT, IDS, cuts=cuts)
    return pooled.generations, cuts


async def _texts(body: ScoreBody | RerankBody, model: ServedModel, context: int) -> object:
    texts = body.text_2 if isinstance(body, ScoreBody) else [document.text for document in body.documents]
    prompts = await pooled_prompts(body, _backend(model, context), texts, param="documents")
    ranks = (body.top_n, body.return_documents is not False) if isinstance(body, RerankBody) else ()
    return prompts, model.pooling.kind_for(body.pooling), body.cache_salt or "", body.priority or 0, ranks


def _backend(model: ServedModel, context: int) -> Any:
    return SimpleNamespace(model=model, name="tiny", max_model_len=lambda: context)


HTTP, OLLAMA, EMBEDDINGS = "docs/http-api.md", "docs/ollama.md", "docs/embeddings.md"
USER = [{"role": "user", "content": "x"}]
APIS = {
    "completions": Api(page=HTTP, body=CompletionBody, make=_completion, required={"prompt": "x"}),
    "chats": Api(page=HTTP, body=ChatBody, make=_chat, required={"messages": USER}),
    "messages": Api(
        page="docs/messages.md", body=MessagesBody, make=_message, required={"messages": USER, "max_tokens": 5}
    ),
    "responses": Api(page="docs/responses.md", body=ResponsesBody, make=_response, required={"input": "x"}),
    "/api/chat": Api(
        page=OLLAMA,
        body=OllamaChatBody,
        make=_ollama_chat,
        required={"messages": USER},
        nested=("options", OllamaOptions),
    ),
    "/api/generate": Api(
        page=OLLAMA,
        body=OllamaGenerateBody,
        make=_ollama_generate,
        required={"prompt": "x"},
        nested=("options", OllamaOptions),
    ),
    "/api/embed": Api(page=OLLAMA, body=OllamaEmbedBody, make=_ollama_embed, required={"input": "x"}),
    "embeddings": Api(page=EMBEDDINGS, body=EmbeddingBody, make=_embeddings, required={"input": "x"}),
    "scores": Api(page=EMBEDDINGS, body=ScoreBody, make=_texts, required={"text_1": "x", "text_2": "x"}),
    "ranks": Api(page=EMBEDDINGS, body=RerankBody, make=_texts, required={"query": "x", "documents": ["x"]}),
}


@pytest.fixture
def model(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    monkeypatch.setattr(secrets, "randbits", lambda _: 7)
    return replace(ServedModel.load(model_dir, "tiny"), defaults=DEFAULTS)


async def _made(api: Api, field: str, given: dict[str, object], model: ServedModel) -> object:
    """What the router makes of a request with these fields, of which `field` is tried; None: an error."""
    required, is_long = api.required, field == "truncate_prompt_tokens"
    if is_long:
        required = {name: json.loads(json.dumps(value).replace('"x"', f'"{LONG}"')) for name, value in required.items()}
    try:
        body = parse_body(api.body, json.dumps({"model": "tiny", **required, **given}).encode())
        made = await api.make(body, model, 64 if is_long else 100)
    except RequestError:
        return None
    return replace(made, created=0) if isinstance(made, GenerationRequest | PooledRequest) else made


def _fields(api: Api) -> dict[str, Callable[[object], dict[str, object]]]:
    """The fields of a body, and how each is given a value."""
    others = set[str]() if api.body.tolerates_unknown_fields else {*UNSUPPORTED}
    names = ({*api.body.model_fields} | others) - {"model", *api.required}
    fields = {name: lambda value, name=name: {name: value} for name in names}
    if api.nested is not None:
        outer, inner = api.nested
        for name in inner.model_fields:
            fields[f"{outer}.{name}"] = lambda value, name=name: {outer: {name: value}}
    return fields


def _documented(name: str) -> dict[str, tuple[set[str], set[str]]]:
    """The values that request nothing, and those with a meaning, by field."""
    found = {}
    on_page = [each for each, api in APIS.items() if api.page == APIS[name].page]
    for fields, *endpoints, nothing, meaning in table_rows(section(APIS[name].page, SECTION)):
        listed = endpoints[0].replace("`", "").split(", ") if endpoints else on_page
        if listed == ["both"] or name in listed or listed == ["all"]:
            for field in fields.replace("`", "").split():
                found[field] = set(nothing.replace("`", "").split()), set(meaning.replace("`", "").split())
    return found


@pytest.mark.parametrize("name", APIS)
async def test_each_value_requests_nothing_or_something_or_is_refused_as_documented(
    name: str, model: ServedModel
) -> None:
    api, found = APIS[name], {}
    for field, with_value in _fields(api).items():
        absent = await _made(api, field, {}, model)
        assert await _made(api, field, with_value(None), model) == absent, f"{field}: null"
        made = {text: await _made(api, field, with_value(json.loads(text)), model) for text in VALUES}
        if kept := {text for text, request in made.items() if request is not None}:
            nothing = {text for text in kept if made[text] == absent}
            found[field] = nothing, kept - nothing
    assert found == _documented(name)


@pytest.mark.parametrize("name", APIS)
async def test_fields_without_effect_take_any_value(name: str, model: ServedModel) -> None:
    api = APIS[name]
    absent = await _made(api, "", {}, model)
    others = {"keep_alive", "unknown"} if api.body.tolerates_unknown_fields else set[str]()
    for field in ({*IGNORED} - {*api.body.model_fields}) | others:
        for text in VALUES:
            assert await _made(api, field, {field: json.loads(text)}, model) == absent, f"{field}: {text}"
