"""The endpoints that return information: models, versions, tokens, the cluster, a request's trace."""

from __future__ import annotations

import time

from aiohttp import web

import pdserve
from pdserve.base.errors import NotFound, RequestError, TooLarge
from pdserve.base.tasks import in_turns
from pdserve.net.admin import Health
from pdserve.peers.workers import WorkerRecord
from pdserve.redis.store import Store
from router_svc.api.authentication import client_of, scope_of
from router_svc.api.http_request import read_body
from router_svc.api.ids import is_traceable_id
from router_svc.api.intake import Intake
from router_svc.api.json_pieces import list_to_json, text_to_json, to_json
from router_svc.api.models import ModelBackend, Models
from router_svc.api.openai.answers import Model, ModelList, TokenizerInfo, Version
from router_svc.api.openai.chat_prompt import messages_for_template, with_documents
from router_svc.api.openai.schema import DetokenizeBody, TokenizeBody
from router_svc.api.openai.shapes import Fields
from router_svc.api.openai.tools import tool_use
from router_svc.api.request_template import with_template
from router_svc.api.served_model import check_token_ids
from router_svc.records.traces import Traces
from router_svc.routing.cluster import TIERS

#: Entries of /v1/requests: by default, and the upper bound.
DEFAULT_REQUESTS, MAX_REQUESTS = 100, 1000


class ModelApi:
    """/v1/models, /version, /tokenizer_info, /tokenize and /detokenize."""

    def __init__(self, models: Models, intake: Intake) -> None:
        self._models = models
        self._intake = intake
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.get("/v1/models", self._list),
            # Names such as `org/model` contain slashes.
            web.get("/v1/models/{name:.+}", self._one_model),
            web.get("/version", self._version),
            web.get("/tokenizer_info", self._tokenizer_info),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        cards = [self._card(name, backend) for name, backend in self._models.listed(client_of(request))]
        listed: ModelList = {"object": "list", "data": cards}
        return _json(listed)

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return _json(self._card(name, self._models.chosen(name, client_of(request))))

    async def _version(self, _: web.Request) -> web.Response:
        version: Version = {"version": pdserve.__version__}
        return _json(version)

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        chosen = self._models.chosen(request.query.get("model"), client_of(request))
        model, special = chosen.model, chosen.model.template.special_tokens
        info: TokenizerInfo = {
            "tokenizer_class": model.tokenizer_class,
            "vocab_size": model.vocab_size,
            "model_max_length": chosen.max_model_len(),
            "bos_token": special.get("bos_token"),
            "eos_token": special.get("eos_token"),
            "unk_token": special.get("unk_token"),
            "pad_token": special.get("pad_token"),
            "sep_token": special.get("sep_token"),
            "cls_token": special.get("cls_token"),
            "eos_token_ids": [*model.tokenizer.eos_token_ids],
            "chat_template": model.template.source or None,
        }
        return _json(info)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, TokenizeBody, self._intake)
        chosen = self._models.chosen(body.model, client_of(request))
        model = chosen.model
        if body.messages is not None:
            if body.chat_template is not None:
                model = await with_template(model, body.chat_template)
            token_ids = await model.encode_chat(
                await messages_for_template(body.messages, model),
                add_generation_prompt=body.add_generation_prompt is not False,
                add_special_tokens=bool(body.add_special_tokens),
                template_kwargs=with_documents(body.chat_template_kwargs or {}, body, model),
                tools=tool_use(body.tools or (), None, is_parallel=True).for_template,
            )
        else:
            special = body.add_special_tokens is not False
            [token_ids] = await model.encode([body.prompt or ""], add_special_tokens=special)
        counts = to_json({"count": len(token_ids), "max_model_len": chosen.max_model_len()})
        to_str = model.tokenizer.token_str

        def answer() -> bytes:
            strs = list_to_json(token_ids, to_str) if body.return_token_strs else b"null"
            return b'%b,"tokens":%b,"token_strs":%b}' % (counts[:-1], list_to_json(token_ids, lambda each: each), strs)

        text = await model.threads.run(len(token_ids), answer)
        return web.Response(body=text, content_type="application/json")

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, DetokenizeBody, self._intake)
        chosen = self._models.chosen(body.model, client_of(request))
        limit = max(chosen.model.max_context, chosen.max_model_len())
        if len(body.tokens) > limit:
            raise TooLarge(
                f"`tokens` has {len(body.tokens)} token ids, but the context holds {limit}. Send it in parts.",
                param="tokens",
            )
        check_token_ids(body.tokens, chosen.model.vocab_size, param="tokens")
        [text] = await chosen.model.decode([body.tokens])
        answer = await chosen.model.threads.run(len(text), lambda: b'{"prompt":%b}' % text_to_json(text))
        return web.Response(body=answer, content_type="application/json")

    def _card(self, name: str, backend: ModelBackend) -> Model:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "root": backend.name,
            "parent": None,
            "max_model_len": backend.max_model_len(),
            "default_sampling_params": backend.model.defaults.model_dump(exclude_none=True),
        }


class OperatorApi:
    """/v1/cluster, /v1/requests and /v1/requests/{id}/trace, for the console, `pdserve status` and `pdserve trace`."""

    def __init__(self, models: Models, traces: Traces, health: Health, store: Store) -> None:
        self._models = models
        self._traces = traces
        self._health = health
        self._store = store

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.get("/v1/cluster", self._cluster_state),
            web.get("/v1/requests", self._requests),
            web.get("/v1/requests/{id}/trace", self._trace),
        ]

    def describe(self) -> dict[str, object]:
        """The state of the cluster, as `GET /v1/cluster` answers it."""
        directory = self._models.first.cluster.directory
        workers = [worker for tier in TIERS for worker in directory.workers_of(tier)]
        return {
            "router": self.describe_router(),
            "redis": {"available": self._store.available},
            "workers": [_worker(worker) for worker in workers],
        }

    def describe_router(self) -> dict[str, object]:
        """The state of the router alone: of its first model, then of each if there are several."""
        models = [_state_of(backend) for backend in self._models]
        return {
            **self._health.describe(),
            "version": pdserve.__version__,
            "model": models[0]["model"],
            "model_revision": models[0]["model_revision"],
            "running": sum(backend.gate.num_admitted for backend in self._models),
            "queued": sum(backend.gate.num_waiting for backend in self._models),
            **({"models": models} if len(models) > 1 else {}),
        }

    async def _cluster_state(self, _: web.Request) -> web.Response:
        return web.json_response(self.describe())

    async def _requests(self, request: web.Request) -> web.Response:
        limit = _limit(request.query.get("limit"))
        briefs = in_turns(self._traces.newest(limit, tenant=scope_of(request)))
        pieces = [to_json(brief) async for brief in briefs]
        return web.Response(body=b'{"requests":[%b]}' % b",".join(pieces), content_type="application/json")

    async def _trace(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        if not is_traceable_id(request_id):
            raise RequestError(
                "The id is not valid. Request ids have letters, digits, '.', '_' and '-', at most 128; those of "
                "further prompts end with ':' and a number.",
                param="id",
            )
        record = await self._traces.get(request_id, tenant=scope_of(request))
        if record is None:
            raise NotFound(f"Request {request_id} is unknown. Only recent requests are kept.")
        return _json(record)


def _limit(text: str | None) -> int:
    """The query parameter `limit`. Raises `RequestError`."""
    if text is None:
        return DEFAULT_REQUESTS
    # Bounded before it is converted: thousands of digits are no integer for Python, and many zeros hide a large one.
    if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_REQUESTS)) and 1 <= int(text) <= MAX_REQUESTS:
        return int(text)
    raise RequestError(f"`limit` is {text[:20]!r}; it must be a whole number from 1 to {MAX_REQUESTS}.", param="limit")


def _state_of(backend: ModelBackend) -> dict[str, object]:
    return {
        "model": backend.name,
        "model_revision": backend.cluster.policy.model_revision,
        "ready": bool(backend.cluster.ready("decode")),
        "running": backend.gate.num_admitted,
        "queued": backend.gate.num_waiting,
    }


def _worker(worker: WorkerRecord) -> Fields:
    return {
        "worker_id": worker.worker_id,
        "tier": worker.tier,
        "ready": worker.ready,
        "epoch": worker.epoch,
        "grpc_address": worker.grpc_address,
        "http_address": worker.http_address,
        "stream_address": worker.stream_address,
        "model": worker.model,
        "max_num_seqs": worker.max_num_seqs,
        "max_model_len": worker.max_model_len,
        "total_blocks": worker.total_blocks,
        "free_blocks": worker.load.free_blocks,
        "running": worker.load.running,
        "waiting": worker.load.waiting,
        "queued_tokens": worker.load.queued_tokens,
        "prefill_tokens_per_s": worker.load.prefill_tokens_per_s,
        "transport": {"paths": dict(worker.transport.paths), "degraded": worker.transport.degraded},
    }


def _json(fields: object) -> web.Response:
    return web.Response(body=to_json(fields), content_type="application/json")
