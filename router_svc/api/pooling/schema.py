"""The request bodies of embeddings, scores and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints

from router_svc.api.body import (
    CACHE_SALT,
    MAX_NAME_CHARACTERS,
    UINT32_MAX,
    GeneratingBody,
    StrictModel,
    TruncatePromptTokens,
)
from router_svc.api.openai.schema import MAX_INPUTS, MAX_PROMPTS, EmbeddingInput, Prompt, read_prompts
from router_svc.generation import MAX_PRIORITY


class PoolingBody(GeneratingBody):
    """Fields that all endpoints with embeddings have in common."""

    #: None: as the model's files say.
    pooling: Literal["last", "cls", "mean"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    #: Prompts share cached blocks only with prompts of the same salt.
    cache_salt: Annotated[str, StringConstraints(pattern=CACHE_SALT)] | None = None
    #: Lower values come first.
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None


def _read_inputs(value: object) -> list[Prompt]:
    return read_prompts(value, MAX_INPUTS)


class EmbeddingBody(PoolingBody):
    """POST /v1/embeddings."""

    input: Annotated[list[Prompt], PlainValidator(_read_inputs, json_schema_input_type=EmbeddingInput)]
    #: None: all of the model's.
    dimensions: Annotated[int, Ge(1), Le(UINT32_MAX)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    return_token_ids: bool | None = None


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_document(value: object) -> object:
    return {"text": value} if isinstance(value, str) else value


_Text = Annotated[str, MinLen(1)]
_TextList = Annotated[list[_Text], MinLen(1), MaxLen(MAX_PROMPTS), Field(fail_fast=True)]
_Texts = Annotated[_TextList, BeforeValidator(_as_list, json_schema_input_type=_Text | _TextList)]


class ScoreBody(PoolingBody):
    """POST /v1/score: one text with many, or as many with as many."""

    text_1: _Texts
    text_2: _Texts


class Document(StrictModel):
    """A text that is ranked."""

    text: _Text


_Document = Annotated[Document, BeforeValidator(_as_document, json_schema_input_type=_Text | Document)]


class RerankBody(PoolingBody):
    """POST /v1/rerank."""

    #: As vLLM, whose default it is.
    nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {"top_n": (0,)}

    query: _Text
    documents: Annotated[list[_Document], MinLen(1), MaxLen(MAX_PROMPTS), Field(fail_fast=True)]
    #: None: all.
    top_n: Annotated[int, Ge(1), Le(UINT32_MAX)] | None = None
    return_documents: bool | None = None
