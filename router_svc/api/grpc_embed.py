"""Embeddings of the gRPC API: its messages as the fields of the HTTP API, and their answer."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.errors import RequestError
from pdserve.base.vectors import floats
from pdserve.v1 import inference_pb2 as pb
from router_svc.api.generations import Endpoint
from router_svc.api.openai.schema import MAX_PROMPTS
from router_svc.api.parse import validate
from router_svc.api.pooling.pooled import PooledRequest
from router_svc.api.pooling.schema import EmbeddingBody

#: Errors name the field as it is in the message.
EMBED = Endpoint(name="pdserve.v1.InferenceService/Embed", prompt_param="inputs")
_OPTIONAL = ("dimensions", "pooling", "normalize", "prompt_name", "add_special_tokens", "truncate_prompt_tokens")


def body_of(request: pb.EmbedRequest) -> EmbeddingBody:
    """The fields that the client has set, validated as those of the HTTP API. Raises `RequestError`."""
    fields: dict[str, object] = {field.name: value for field, value in request.ListFields() if field.name in _OPTIONAL}
    fields |= {"model": request.model, "priority": request.priority}
    if request.cache_salt:
        fields["cache_salt"] = request.cache_salt
    if not 1 <= len(request.inputs) <= MAX_PROMPTS:
        raise RequestError(
            f"`inputs` has {len(request.inputs)} inputs. Send 1 to {MAX_PROMPTS} in a request.", param="inputs"
        )
    for index, given in enumerate(request.inputs):
        if not (given.text or given.token_ids.ids):
            raise RequestError(f"`inputs[{index}]` is empty. Set its `text` or `token_ids`.", param=f"inputs[{index}]")
    kinds = {given.WhichOneof("input") for given in request.inputs}
    if len(kinds) > 1:
        raise RequestError("`inputs` has texts and token ids. Send one kind in a request.", param="inputs")
    fields["input"] = [given.text or list(given.token_ids.ids) for given in request.inputs]
    return validate(EmbeddingBody, fields)


def answer_of(request: pb.EmbedRequest, pooled: PooledRequest, embeddings: Sequence[bytes]) -> pb.EmbedResponse:
    """The embeddings, in the order of the inputs."""
    usage = pb.Usage(prompt_tokens=pooled.usage["prompt_tokens"])
    answer = pb.EmbedResponse(request_id=pooled.response_id, usage=usage)
    for generation, values in zip(pooled.generations, embeddings, strict=True):
        prompt = generation.prompt if request.return_token_ids else ()
        answer.embeddings.add(values=floats(values), prompt_token_ids=prompt)
    return answer
