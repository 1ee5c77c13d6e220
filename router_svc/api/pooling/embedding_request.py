"""From a validated body to the prompts whose embeddings it requests."""

from __future__ import annotations

from pdserve.base.errors import RequestError, TooLarge
from pdserve.base.pooling import Pooling
from router_svc.api.generations import Endpoint
from router_svc.api.ids import Ids
from router_svc.api.models import ModelBackend
from router_svc.api.pooling.pooled import (
    MAX_NUMBERS,
    PooledRequest,
    pooled_prompts,
    pooled_request,
    require_few_numbers,
)
from router_svc.api.pooling.schema import EmbeddingBody

#: Tokens of all inputs of one request, as OpenAI's API has it.
MAX_INPUT_TOKENS = 300_000
#: Numbers of all embeddings of one request as base64, which has less than a third of the bytes: 32 MiB.
MAX_ENCODED_NUMBERS = 2 * MAX_NUMBERS


async def embedding_request(
    body: EmbeddingBody, chosen: ModelBackend, endpoint: Endpoint, ids: Ids, *, cuts: bool = False
) -> PooledRequest:
    """The prompts of a request for embeddings. `cuts`: long texts are cut to their start. Raises `RequestError`."""
    own, param = chosen.model.pooling, endpoint.prompt_param
    dimensions = body.dimensions or own.dimensions
    if dimensions > own.dimensions:
        raise RequestError(
            f"`dimensions` is {dimensions}, but embeddings of this model have {own.dimensions}. Lower it.",
            param="dimensions",
        )
    texts = [each for each in body.input if isinstance(each, str)]
    token_ids = [each for each in body.input if isinstance(each, list)]
    if body.prompt_name is not None and token_ids:
        raise RequestError("`prompt_name` needs texts. Put the prompt's tokens before the input's.", param=param)
    before = own.prompt(body.prompt_name)
    texts = [before + text for text in texts]
    prompts = await pooled_prompts(body, chosen, texts, token_ids, param=param, cuts=cuts)
    if (num_tokens := sum(map(len, prompts))) > MAX_INPUT_TOKENS:
        raise TooLarge(
            f"`{param}` has {num_tokens} tokens in all, more than {MAX_INPUT_TOKENS}. Split the request.",
            param=param,
        )
    kind, normalizes = own.kind_for(body.pooling), body.normalize is not False
    pooling = Pooling(kind=kind, dimensions=dimensions, normalizes=normalizes)
    max_numbers = MAX_NUMBERS if body.encoding_format != "base64" else MAX_ENCODED_NUMBERS
    require_few_numbers(len(prompts), dimensions, max_numbers, param=param)
    return await pooled_request(body, chosen, prompts, pooling, endpoint, ids)
