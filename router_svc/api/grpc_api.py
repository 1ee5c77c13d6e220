"""`pdserve.v1.InferenceService`: the same requests over gRPC, validated by the same rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc

from pdserve.base.audit import Caller, Refusals
from pdserve.base.errors import NotFound, RequestError
from pdserve.base.ids import RequestId
from pdserve.base.rpc import GrpcPort, method, trace_of
from pdserve.base.sampling import MAX_LOGPROBS
from pdserve.base.tracing.spans import NO_TRACER, Tracer
from pdserve.v1 import inference_pb2 as pb
from router_svc.api.authentication import LimitHeaders, caller_of_rpc, host_of, no_limit_headers
from router_svc.api.body import CACHE_SALT, SamplingFields
from router_svc.api.cancel_api import CancelApi
from router_svc.api.event_ids import parse_event_id
from router_svc.api.generations import DEFAULT_MAX_TOKENS, GRPC, GenerationFactory, require_model
from router_svc.api.grpc_message import parse_cancel, parse_request, parse_resume
from router_svc.api.grpc_output import send
from router_svc.api.ids import Ids, is_valid_id
from router_svc.api.intake import Intake
from router_svc.api.parse import validate
from router_svc.api.request_span import request_span
from router_svc.api.resuming import GRPC as API
from router_svc.api.resuming import Resuming, event_ids
from router_svc.api.sampling import EndpointFields
from router_svc.api.served_model import ServedModel
from router_svc.clients.access import Access
from router_svc.config import RouterConfig
from router_svc.generation import Generation
from router_svc.records.resumable import ResponseShape
from router_svc.records.stream_log import StreamLog
from router_svc.request.client import Client
from router_svc.request.open_requests import OpenRequest
from router_svc.request.replayed import ReplayedStream
from router_svc.request.requests import Requests

SERVICE = "pdserve.v1.InferenceService"
_METHOD = f"{SERVICE}/Generate"
#: Calls at a time: those that run, and health checks, beside those in the admission queue.
_CALLS_BEYOND_QUEUE = 1024
_CALLS_PER_CONNECTION = 1024
_BEFORE_DEADLINE_S = 0.02


def public_port(config: RouterConfig, credentials: grpc.ServerCredentials | None) -> GrpcPort:
    """Where clients call, within limits for strangers. `credentials`: of TLS; None: without."""
    return GrpcPort(
        host=config.host,
        port=config.effective_grpc_port,
        flag="--grpc-port",
        credentials=credentials,
        max_request_bytes=config.max_body,
        max_calls=config.max_num_queued_reqs + _CALLS_BEYOND_QUEUE,
        max_calls_per_connection=_CALLS_PER_CONNECTION,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """What a call passes before it is served: keys, the byte budget, and the log of refusals; and what cancels it."""

    access: Access
    intake: Intake
    refusals: Refusals
    cancel: CancelApi
    limit_headers: LimitHeaders = no_limit_headers


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: a model's requests, and their streams. Without `resuming`, these cannot be resumed."""

    model: ServedModel
    requests: Requests
    max_model_len: Callable[[], int]
    resuming: Resuming | None = None


class InferenceServicer:
    """The service that gRPC clients call."""

    def __init__(self, served: Served, guards: Guards, tracer: Tracer = NO_TRACER) -> None:
        self._access = guards.access
        self._limit_headers = guards.limit_headers
        self._refusals = guards.refusals
        self._intake = guards.intake
        self._cancelled = guards.cancel.cancelled
        self._tracer = tracer
        self._model = served.model
        self._requests = served.requests
        self._max_model_len = served.max_model_len
        self._resuming = served.resuming

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server. Messages arrive as bytes: their sizes are checked before they are parsed."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_stream_rpc_method_handler(
                handler, response_serializer=pb.GenerateResponse.SerializeToString
            )
            for name, handler in (("Generate", self.Generate), ("Resume", self.Resume))
        }
        handlers["Cancel"] = grpc.unary_unary_rpc_method_handler(
            self.Cancel, response_serializer=pb.CancelResponse.SerializeToString
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        server.add_registered_method_handlers(SERVICE, handlers)

    @method
    async def Generate(  # noqa: N802 - the name is the protocol's
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Streams a completion. Closing the call cancels it on all workers."""
        caller = Caller(client=host_of(context.peer()), endpoint=_METHOD, model="", request_id="")
        with self._intake.hold() as hold:
            with self._refusals.watching(caller):
                client = caller_of_rpc(context, self._access)
                hold.add(len(data))
                request = parse_request(data, self._max_model_len())
            caller = replace(caller, model=request.model, request_id=request.request_id)
            with request_span(self._tracer, _METHOD, trace_of(context)) as span, self._refusals.watching(caller):
                span.attributes |= {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "Generate"}
                ids = Ids.make("gen-", request.request_id or None)
                with self._limits_shown(client, context):
                    async with self._opened(ids.of_prompt(0), client, context) as opened:
                        opened.trace = span.context
                        generation = await self._generation(request, ids)
                        hold.release()
                        log = self._new_log(client, generation, ids)
                        async with self._requests.run([generation], client, opened, log) as stream:
                            await send(context, generation, stream, None if log is None else event_ids(log))

    @method
    async def Resume(  # noqa: N802 - the name is the protocol's
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Goes on with the stream of another call. Closing the call cancels it on all workers."""
        caller = Caller(client=host_of(context.peer()), endpoint=f"{SERVICE}/Resume", model="", request_id="")
        with self._refusals.watching(caller):
            client = caller_of_rpc(context, self._access)
            request = parse_resume(data)
            seen = parse_event_id(request.position, param="position")
            if self._resuming is None:
                raise NotFound("Streams of this server cannot be resumed.")
            with self._limits_shown(client, context):
                async with self._resuming.taken(client, API, request.request_id, seen) as (log, is_complete):
                    [generation] = log.resumable.generations
                    ids = event_ids(log, seen)
                    if is_complete:
                        await send(context, generation, ReplayedStream(log, self._model.tokenizer), ids)
                        return
                    async with self._opened(generation.request_id, client, context) as opened:
                        opened.trace = trace_of(context)
                        async with self._requests.run([generation], client, opened, log) as stream:
                            await send(context, generation, stream, ids)

    @method
    async def Cancel(  # noqa: N802 - the name is the protocol's
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelResponse:
        """Ends a request of the caller."""
        caller = Caller(client=host_of(context.peer()), endpoint=f"{SERVICE}/Cancel", model="", request_id="")
        with self._refusals.watching(caller):
            client = caller_of_rpc(context, self._access)
            request = parse_cancel(data)
            answer = await self._cancelled(request.request_id, None if client.is_admin else client.tenant)
            return pb.CancelResponse(status=answer["status"])

    def _opened(
        self, request_id: RequestId, client: Client, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AbstractAsyncContextManager[OpenRequest]:
        """The request, until the caller's deadline within the limit, or for the default time."""
        requests = self._requests.open
        left_s = cast(float | None, context.time_remaining())  # Its type knows no call without a deadline.
        if left_s is None:
            timeout_s = requests.limits.of_header(None)
        else:
            # The call itself ends at its deadline. A little earlier, the record names the deadline as the reason.
            timeout_s = min(max(left_s - _BEFORE_DEADLINE_S, 0.0), requests.limits.max_s)
        return requests.entered(request_id, client.tenant, timeout_s)

    def _new_log(self, client: Client, generation: Generation, ids: Ids) -> StreamLog | None:
        if self._resuming is None:
            return None
        return self._resuming.new_log(client, API, _shape(generation, ids, self._model.name), [generation])

    @contextmanager
    def _limits_shown(self, client: Client, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Tells a client with limits in the end what it has left."""
        try:
            yield
        finally:
            if client.limits is not None:
                context.set_trailing_metadata(tuple(self._limit_headers(client).items()))

    async def _generation(self, request: pb.GenerateRequest, ids: Ids) -> Generation:
        require_model(request.model, self._model)
        if request.request_id and not is_valid_id(request.request_id):
            raise RequestError(
                "`request_id` may have letters, digits, '.', '_' and '-', at most 128.", param="request_id"
            )
        if request.cache_salt and re.fullmatch(CACHE_SALT, request.cache_salt) is None:
            raise RequestError(
                "`cache_salt` may have at most 128 characters, none of them '@', '/', a backslash or NUL.",
                param="cache_salt",
            )
        fields = _sampling_fields(request.sampling)
        prompt = await self._prompt(request)
        logprobs = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
        if logprobs is not None and logprobs > MAX_LOGPROBS:
            raise RequestError(f"`logprobs` is {logprobs} (limit {MAX_LOGPROBS}). Lower it.", param="logprobs")
        own_fields = EndpointFields(
            max_tokens=fields.max_tokens, default_max_tokens=DEFAULT_MAX_TOKENS, logprobs=logprobs
        )
        factory = GenerationFactory(
            model=self._model,
            max_model_len=self._max_model_len(),
            ids=ids,
            endpoint=GRPC,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        [generation] = await factory.make(fields, own_fields, [prompt])
        return generation

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        max_model_len = self._max_model_len()
        if request.WhichOneof("prompt") == "text":
            texts = [request.text]
            [prompt] = await self._model.encode(texts, add_special_tokens=True, max_model_len=max_model_len)
        else:
            prompt = list(request.token_ids.ids)
            await self._model.check_prompts([prompt], max_model_len)
        if not prompt:
            raise RequestError("`prompt` must not be empty. Send a text or token ids.", param="prompt")
        return prompt


def _sampling_fields(sampling: pb.ClientSampling) -> SamplingFields:
    """The fields that the client has set, validated as those of the HTTP API. Their size was, before parsing."""
    fields: dict[str, object] = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    fields |= {
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    # The HTTP endpoints name this field differently.
    fields.pop("logprobs", None)
    return validate(SamplingFields, fields)


def _shape(generation: Generation, ids: Ids, model_name: str) -> ResponseShape:
    """What is kept of a response; its messages have no more."""
    return ResponseShape(
        response_id=generation.request_id,
        header_id=ids.header,
        model=model_name,
        created=0,
        include_usage=True,
        continuous_usage=False,
    )
