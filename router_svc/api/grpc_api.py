"""`pdserve.v1.InferenceService`: the same requests over gRPC, validated by the same rules."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import grpc

from pdserve.base.errors import NotFound, RequestError
from pdserve.base.sampling import MAX_LOGPROBS
from pdserve.net.rpc import GrpcPort, method, trace_of
from pdserve.observe.audit import Caller, Refusals
from pdserve.observe.tracing.spans import NO_TRACER, Tracer
from pdserve.v1 import inference_pb2 as pb
from router_svc.api.authentication import LimitHeaders, caller_of_rpc, host_of, no_limit_headers
from router_svc.api.body import CACHE_SALT, SamplingFields
from router_svc.api.cancel_api import CancelApi
from router_svc.api.event_ids import parse_event_id
from router_svc.api.generations import DEFAULT_MAX_TOKENS, GRPC
from router_svc.api.grpc_call import limits_shown, opened_call, require_id
from router_svc.api.grpc_embed import EMBED, answer_of, body_of
from router_svc.api.grpc_message import parse_cancel, parse_embed, parse_request, parse_resume
from router_svc.api.grpc_output import send
from router_svc.api.grpc_structure import structured_fields
from router_svc.api.ids import Ids
from router_svc.api.intake import Intake
from router_svc.api.models import ModelBackend, Models
from router_svc.api.parse import validate
from router_svc.api.pooling.embedding_request import embedding_request
from router_svc.api.pooling.pooled import embeddings_of
from router_svc.api.prompt_tokens import tokens_to_keep
from router_svc.api.request_span import request_span
from router_svc.api.resuming import GRPC as API
from router_svc.api.resuming import Resuming, event_ids
from router_svc.api.sampling import EndpointFields
from router_svc.api.thinking_budget import budget_of_prompt
from router_svc.clients.access import Access
from router_svc.config import RouterConfig
from router_svc.generation import Generation
from router_svc.records.resumable import ResponseShape
from router_svc.records.stream_log import StreamLog
from router_svc.request.client import Client
from router_svc.request.open_requests import OpenRequests
from router_svc.request.replayed import ReplayedStream

SERVICE = "pdserve.v1.InferenceService"
_METHOD = f"{SERVICE}/Generate"
#: Calls at a time: those that run, and health checks, beside those in the admission queue.
_CALLS_BEYOND_QUEUE = 1024
_CALLS_PER_CONNECTION = 1024


def public_port(config: RouterConfig, credentials: grpc.ServerCredentials | None) -> GrpcPort:
    """Where clients call, within limits for strangers. `credentials`: of TLS; None: without."""
    return GrpcPort(
        host=config.host,
        port=config.effective_grpc_port,
        flag="--grpc-port",
        credentials=credentials,
        max_request_bytes=config.max_body,
        max_calls=len(config.model) * config.max_num_queued_reqs + _CALLS_BEYOND_QUEUE,
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
    """What is served: requests for models, and their streams. Without `resuming`, these cannot be resumed."""

    models: Models
    #: The open requests of all models.
    open: OpenRequests
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
        self._models = served.models
        self._open = served.open
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
        handlers["Embed"] = grpc.unary_unary_rpc_method_handler(
            self.Embed, response_serializer=pb.EmbedResponse.SerializeToString
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
                request = parse_request(data, self._models.max_model_len())
            caller = replace(caller, model=request.model, request_id=request.request_id)
            with request_span(self._tracer, _METHOD, trace_of(context)) as span, self._refusals.watching(caller):
                span.attributes |= {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "Generate"}
                ids = Ids.make("gen-", request.request_id or None)
                with limits_shown(self._limit_headers, client, context):
                    async with opened_call(self._open, ids.of_prompt(0), client, context) as opened:
                        opened.trace = span.context
                        chosen = self._models.chosen(request.model, client)
                        generation = await _generation(request, chosen, ids)
                        hold.release()
                        shape = _shape(generation, ids, chosen.name, return_token_ids=request.return_token_ids)
                        log = self._new_log(client, generation, shape)
                        async with chosen.requests.run([generation], client, opened, log) as stream:
                            prompt = generation.prompt if request.return_token_ids else ()
                            await send(context, generation, stream, None if log is None else event_ids(log), prompt)

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
            with limits_shown(self._limit_headers, client, context):
                log, is_complete = await self._resuming.found(client, API, request.request_id, seen)
                backend = self._models.chosen(log.resumable.shape.model, client)
                [generation] = log.resumable.generations
                ids = event_ids(log, seen)
                has_prompt = request.position or not log.resumable.shape.return_token_ids
                prompt = () if has_prompt else generation.prompt
                if is_complete:
                    await send(context, generation, ReplayedStream(log, backend.model.tokenizer), ids, prompt)
                    return
                async with opened_call(self._open, generation.request_id, client, context) as opened:
                    opened.trace = trace_of(context)
                    async with backend.requests.run([generation], client, opened, log) as stream:
                        await send(context, generation, stream, ids, prompt)

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

    @method
    async def Embed(  # noqa: N802 - the name is the protocol's
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EmbedResponse:
        """A vector for each input. Closing the call cancels it on all workers."""
        caller = Caller(client=host_of(context.peer()), endpoint=EMBED.name, model="", request_id="")
        with self._intake.hold() as hold:
            with self._refusals.watching(caller):
                client = caller_of_rpc(context, self._access)
                hold.add(len(data))
                request = parse_embed(data, self._models.max_model_len())
            caller = replace(caller, model=request.model, request_id=request.request_id)
            with request_span(self._tracer, EMBED.name, trace_of(context)) as span, self._refusals.watching(caller):
                span.attributes |= {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "Embed"}
                require_id(request.request_id)
                ids = Ids.make("embd-", request.request_id or None)
                with limits_shown(self._limit_headers, client, context):
                    async with opened_call(self._open, ids.of_prompt(0), client, context) as opened:
                        opened.trace = span.context
                        chosen = self._models.chosen(request.model, client)
                        pooled = await embedding_request(body_of(request), chosen, EMBED, ids)
                        hold.release()
                        values = await embeddings_of(pooled, client, opened)
                        return answer_of(request, pooled, values)

    def _new_log(self, client: Client, generation: Generation, shape: ResponseShape) -> StreamLog | None:
        if self._resuming is None or generation.prompt_logprobs is not None:
            return None
        return self._resuming.new_log(client, API, shape, [generation])


async def _generation(request: pb.GenerateRequest, chosen: ModelBackend, ids: Ids) -> Generation:
    require_id(request.request_id)
    if request.cache_salt and re.fullmatch(CACHE_SALT, request.cache_salt) is None:
        raise RequestError(
            "`cache_salt` may have at most 128 characters, none of them '@', '/', a backslash or NUL.",
            param="cache_salt",
        )
    fields = _sampling_fields(request.sampling)
    prompt = await _prompt(request, chosen, fields.max_tokens or DEFAULT_MAX_TOKENS)
    grammar = await chosen.model.grammar_of(structured_fields(request))
    budget = request.sampling.thinking_token_budget if request.sampling.HasField("thinking_token_budget") else None
    own_fields = EndpointFields(
        max_tokens=fields.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=_alternatives(request.sampling, "logprobs"),
        prompt_logprobs=_alternatives(request.sampling, "prompt_logprobs"),
        grammar=grammar,
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        bad_words=await chosen.model.bad_words(fields.bad_words or ()),
        thinking=await budget_of_prompt(chosen.model, budget, prompt, has_grammar=bool(grammar)),
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    [generation] = await chosen.factory(ids, GRPC).make(fields, own_fields, [prompt])
    return generation


async def _prompt(request: pb.GenerateRequest, chosen: ModelBackend, output_tokens: int) -> list[int]:
    max_model_len = chosen.max_model_len()
    truncate = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    keep = tokens_to_keep(truncate, output_tokens, max_model_len)
    if request.WhichOneof("prompt") == "text":
        texts = [request.text]
        [prompt] = await chosen.model.encode(texts, add_special_tokens=True, max_model_len=max_model_len, keep=keep)
    else:
        prompt = list(request.token_ids.ids)[-(keep or 0) :]
        await chosen.model.check_prompts([prompt], max_model_len)
    if not prompt:
        raise RequestError("`prompt` must not be empty. Send a text or token ids.", param="prompt")
    return prompt


def _sampling_fields(sampling: pb.ClientSampling) -> SamplingFields:
    """The fields that the client has set, validated as those of the HTTP API. Their size was checked before parsing."""
    fields: dict[str, object] = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    fields |= {
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "bad_words": list(sampling.bad_words),
        "logprob_token_ids": list(sampling.logprob_token_ids),
    }
    # The HTTP endpoints name these fields differently, or only some of them have them.
    for name in ("logprobs", "prompt_logprobs", "thinking_token_budget"):
        fields.pop(name, None)
    return validate(SamplingFields, fields)


def _alternatives(sampling: pb.ClientSampling, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    """The alternatives that a field requests; None: no log-probabilities. Raises `RequestError`."""
    number = sampling.logprobs if name == "logprobs" else sampling.prompt_logprobs
    if number > MAX_LOGPROBS:
        raise RequestError(f"`{name}` is {number} (limit {MAX_LOGPROBS}). Lower it.", param=name)
    return number if sampling.HasField(name) else None


def _shape(generation: Generation, ids: Ids, model_name: str, *, return_token_ids: bool) -> ResponseShape:
    """What is kept of a response: all that its messages contain."""
    return ResponseShape(
        response_id=generation.request_id,
        header_id=ids.header,
        model=model_name,
        created=0,
        include_usage=True,
        continuous_usage=False,
        return_token_ids=return_token_ids,
    )
