"""The request bodies of /api/embed and /api/embeddings, and the embeddings that they mean."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BeforeValidator, Field, StringConstraints

from router_svc.api.body import CACHE_SALT, UINT32_MAX, GeneratingBody
from router_svc.api.lenient import LENIENT
from router_svc.api.openai.schema import MAX_INPUTS
from router_svc.api.pooling.schema import EmbeddingBody
from router_svc.generation import MAX_PRIORITY


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


_Text = Annotated[str, MinLen(1)]
_TextList = Annotated[list[_Text], MinLen(1), MaxLen(MAX_INPUTS), Field(fail_fast=True)]


class OllamaEmbeddingBody(GeneratingBody):
    """What both endpoints with embeddings have in common."""

    model_config = LENIENT
    tolerates_unknown_fields: ClassVar[bool] = True

    cache_salt: Annotated[str, StringConstraints(pattern=CACHE_SALT)] | None = None
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None


class OllamaEmbedBody(OllamaEmbeddingBody):
    """POST /api/embed."""

    input: Annotated[
        _TextList,
        BeforeValidator(_as_list, json_schema_input_type=_Text | _TextList),
        Field(description="A text, or a list of texts."),
    ]
    truncate: Annotated[
        bool | None, Field(description="Whether the end of a text that is too long is left out. Default: true.")
    ] = None
    dimensions: Annotated[int, Ge(1), Le(UINT32_MAX)] | None = None

    def meant(self, model: str) -> EmbeddingBody:
        """The embeddings that this request means."""
        return EmbeddingBody.model_construct(
            model=model,
            input=self.input,
            dimensions=self.dimensions,
            cache_salt=self.cache_salt,
            priority=self.priority,
        )


class OllamaEmbeddingsBody(OllamaEmbeddingBody):
    """POST /api/embeddings, the older form."""

    prompt: Annotated[_Text, Field(description="The text.")]

    def meant(self, model: str) -> EmbeddingBody:
        """The embedding that this request means, which has its own length here."""
        return EmbeddingBody.model_construct(
            model=model, input=[self.prompt], normalize=False, cache_salt=self.cache_salt, priority=self.priority
        )
