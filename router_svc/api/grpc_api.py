"""`pdserve.v1.InferenceService`: the same requests over gRPC, checked by the same rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from pdserve.base.errors import RequestError, TransferTimeout
from pdserve.base.rpc import method
from pdserve.base.sampling import MAX_LOGPROBS
from pdserve.base.wire import logprobs_to_wire
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from router_svc.api.ids import Ids, is_valid_id
from router_svc.api.openai.jobs import DEFAULT_MAX_TOKENS, require_model
from router_svc.api.openai.schema import SamplingFields
from router_svc.api.parse import validate
from router_svc.api.sampling import (
    Asked,
    check_token_ids,
    require_bounded,
    require_room,
    sampling_params,
    text_rules,
)
from router_svc.api.served_model import ServedModel
from router_svc.generation import Generation
from router_svc.request.output import ChoiceDelta
from router_svc.request.requests import Requests

SERVICE = "pdserve.v1.InferenceService"


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """What gRPC clients call."""

    def __init__(self, model: ServedModel, requests: Requests, max_model_len: Callable[[], int]) -> None:
        self._model = model
        self._requests = requests
        self._max_model_len = max_model_len

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    @method
    async def Generate(  # noqa: N802 - the name is the protocol's
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Streams a completion; closing the call ends it everywhere."""
        generation = await self._generation(request)
        async with self._requests.run([generation]) as stream:

            async def write(deltas: list[ChoiceDelta]) -> None:
                choices = [_choice(delta) for delta in deltas]
                await context.write(pb.GenerateResponse(request_id=generation.request_id, choices=choices))
                stream.first_write()

            try:
                await stream.write_to(write)
            except ConnectionResetError as error:
                raise TransferTimeout(f"The client is gone: {error}.") from None
            usage = stream.usage
            await context.write(
                pb.GenerateResponse(
                    request_id=generation.request_id,
                    usage=pb.Usage(
                        prompt_tokens=usage.prompt_tokens,
                        completion_tokens=usage.completion_tokens,
                        cached_tokens=usage.cached_tokens,
                    ),
                )
            )

    async def _generation(self, request: pb.GenerateRequest) -> Generation:
        require_model(request.model, self._model)
        if request.request_id and not is_valid_id(request.request_id):
            raise RequestError(
                "`request_id` may have letters, digits, '.', '_' and '-', 128 at most.", param="request_id"
            )
        fields = _sampling_fields(request.sampling)
        prompt = await self._prompt(request)
        require_room(len(prompt), max_model_len := self._max_model_len(), param="prompt")
        logprobs = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
        if logprobs is not None and logprobs > MAX_LOGPROBS:
            raise RequestError(f"`logprobs` may be {MAX_LOGPROBS} at most (got {logprobs}).", param="logprobs")
        asked = Asked(max_tokens=fields.max_tokens, default_max_tokens=DEFAULT_MAX_TOKENS, logprobs=logprobs)
        sampling = sampling_params(fields, asked, self._model, prompt_tokens=len(prompt), max_model_len=max_model_len)
        require_bounded([sampling])
        ids = Ids.make("gen-", request.request_id or None)
        return Generation(
            request_id=ids.of_prompt(0),
            worker_request_id=ids.for_workers(0),
            prompt=tuple(prompt),
            sampling=sampling,
            text=text_rules(fields),
            endpoint="grpc",
        )

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        prompt = list(request.token_ids.ids)
        if request.WhichOneof("prompt") == "text":
            self._model.require_plausible(request.text, param="prompt")
            [prompt] = await self._model.encode([request.text], add_special_tokens=True)
        check_token_ids(prompt, self._model.vocab_size, param="prompt")
        if not prompt:
            raise RequestError("`prompt` must not be empty.", param="prompt")
        return prompt


def _sampling_fields(sampling: pb.ClientSampling) -> SamplingFields:
    """What was set, through the checks that HTTP's fields go through."""
    fields: dict[str, object] = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    fields |= {
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    # HTTP's endpoints name it differently.
    fields.pop("logprobs", None)
    return validate(SamplingFields, fields)


def _choice(delta: ChoiceDelta) -> pb.GenerateChoice:
    return pb.GenerateChoice(
        choice_index=delta.choice_index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[logprobs_to_wire(entry) for entry in delta.logprobs],
        finish_reason=delta.finish_reason.value if delta.finish_reason else "",
    )
