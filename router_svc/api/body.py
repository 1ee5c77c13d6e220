"""The base of all request bodies, and the sampling fields that HTTP and gRPC share.

Bodies are strict: a wrong type is refused instead of converted, and unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import (
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema

from pdserve.base.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from router_svc.api.body_schema import Conditions, Schema, with_conditions, with_harmless, with_nothing
from router_svc.api.fields import IGNORED, UNSUPPORTED, without_neutral

MAX_NAME_CHARACTERS = 256
MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORDS = 128

#: As in vLLM: up to 128 characters, none of them `@`, `/`, a backslash or NUL.
CACHE_SALT = r"^[^@/\\\x00]{1,128}$"

UINT32_MAX = 2**32 - 1
INT64 = (Ge(-(2**63)), Le(2**63 - 1))

Finite = Annotated[float, AllowInfNan(False)]
Bias = Annotated[Finite, Ge(-MAX_BIAS), Le(MAX_BIAS)]
TokenId = Annotated[int, Ge(0), Le(UINT32_MAX)]


class StrictModel(BaseModel):
    """An object within a body, under the same rules."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Body(StrictModel):
    """The rules that all bodies have in common."""

    #: What the validators of several fields check, as JSON Schema.
    conditions: ClassVar[Conditions] = ()
    #: Values of its fields that request nothing, as if the field were absent.
    nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    #: Whether unknown fields are ignored, whatever the router does with those of other bodies.
    tolerates_unknown_fields: ClassVar[bool] = False
    #: The objects in these lists, of which unknown fields are ignored, too.
    tolerant_lists: ClassVar[Mapping[str, type[BaseModel]]] = {}
    _ignored_fields: tuple[str, ...] = ()

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of the fields that were sent and are unknown, without repetition."""
        return self._ignored_fields

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler.resolve_ref_schema(handler(core))
        with_nothing(schema, cls.nothing)
        if cls.tolerates_unknown_fields:
            schema["additionalProperties"] = True
            return with_conditions(schema, cls.conditions)
        with_harmless(schema, UNSUPPORTED, IGNORED)
        return with_conditions(schema, cls.conditions)

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_and_neutral(cls, value: object) -> object:
        """Drops fields without effect (`"user": "me"`) and fields at values that request nothing (`"tools": []`)."""
        if not isinstance(value, dict):
            return value
        own = cls.model_fields
        unsupported = {name: neutral for name, neutral in UNSUPPORTED.items() if name not in own}
        kept = {name: field for name, field in value.items() if name not in IGNORED or name in own}
        return without_neutral(kept, {**unsupported, **cls.nothing})


class GeneratingBody(Body):
    """What all requests that generate have, whatever else their endpoint takes."""

    model: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)]
    #: Seconds.
    timeout: Annotated[float, Gt(0), AllowInfNan(False)] | None = None


#: Tokens to keep of a prompt, the last ones; -1: as many as fit. `prompt_tokens.tokens_to_keep` refuses 0.
TruncatePromptTokens = Annotated[
    int,
    Ge(-1),
    Le(2**31 - 1),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": 2**31 - 1, "not": {"const": 0}}),
]


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


_Stop = Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARACTERS)]
_StopStrings = Annotated[list[_Stop], MaxLen(MAX_STOP_STRINGS)]
_StopInput = _Stop | _StopStrings
_BadWord = Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARACTERS)]
#: Keys of JSON objects are strings. That they are digits is checked with the vocabulary.
_TokenIdText = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,10}$"})]


#: Tokens; -1: any number.
ThinkingTokens = Annotated[int, Ge(-1), Le(2**31 - 1)]


class SamplingFields(Body):
    """How tokens are chosen. An absent or null field takes the model's default."""

    #: As vLLM, which takes -1 for no seed, and Ollama.
    nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {"seed": (-1,)}

    temperature: Annotated[Finite, Ge(0), Le(MAX_TEMPERATURE)] | None = None
    top_p: Annotated[Finite, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1), Le(UINT32_MAX)] | None = None
    min_p: Annotated[Finite, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[Finite, Ge(MIN_REPETITION_PENALTY), Le(MAX_REPETITION_PENALTY)] | None = None
    presence_penalty: Annotated[Finite, Ge(-MAX_PENALTY), Le(MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[Finite, Ge(-MAX_PENALTY), Le(MAX_PENALTY)] | None = None
    logit_bias: Annotated[dict[_TokenIdText, Bias], MaxLen(MAX_LOGIT_BIAS)] | None = None
    stop: Annotated[_StopStrings, BeforeValidator(_one_or_more, json_schema_input_type=_StopInput)] | None = None
    stop_token_ids: Annotated[list[TokenId], MaxLen(MAX_STOP_TOKEN_IDS)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], MinLen(1), MaxLen(MAX_ALLOWED_TOKEN_IDS), Field(fail_fast=True)] | None
    ) = None
    logprob_token_ids: Annotated[list[TokenId], MaxLen(MAX_LOGPROB_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[_BadWord], MaxLen(MAX_BAD_WORDS), Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Ge(0), Le(UINT32_MAX)] | None = None
    max_tokens: Annotated[int, Ge(1), Le(UINT32_MAX)] | None = None
    seed: Annotated[int, *INT64] | None = None
    n: Annotated[int, Ge(1), Le(MAX_N)] | None = None
