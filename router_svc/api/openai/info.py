"""The endpoints that return information: models, versions, tokens, the cluster, a request's trace."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from aiohttp import web

import pdserve
from pdserve.base.admin import Health
from pdserve.base.errors import NotFound, RequestError, TooLarge
from pdserve.base.store import Store
from pdserve.base.tasks import in_turns
from pdserve.base.workers import WorkerRecord
from router_svc.api.authentication import scope_of
from router_svc.api.generations import require_model
from router_svc.api.http_request import read_body
from router_svc.api.ids import is_traceable_id
from router_svc.api.intake import Intake
from router_svc.api.json_pieces import list_to_json, text_to_json, to_json
from router_svc.api.openai.answers import Model, ModelList, Version
from router_svc.api.openai.schema import DetokenizeBody, TokenizeBody
from router_svc.api.openai.shapes import Fields
from router_svc.api.served_model import ServedModel, check_token_ids
from router_svc.records.traces import Traces
from router_svc.request.gate import Gate
from router_svc.routing.cluster import TIERS, Cluster

#: Entries of /v1/requests: by default, and the upper bound.
DEFAULT_REQUESTS, MAX_REQUESTS = 100, 1000


class ModelApi:
    """/v1/models, /version, /tokenize and /detokenize."""

    def __init__(self, model: ServedModel, max_model_len: Callable[[], int], intake: Intake) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._intake = intake
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.get("/v1/models", self._models),
            # Names such as `org/model` contain slashes.
            web.get("/v1/models/{name:.+}", self._one_model),
            web.get("/version", self._version),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        listed: ModelList = {"object": "list", "data": [self._card()]}
        return _json(listed)

    async def _one_model(self, request: web.Request) -> web.Response:
        require_model(request.match_info["name"], self._model)
        return _json(self._card())

    async def _version(self, _: web.Request) -> web.Response:
        version: Version = {"version": pdserve.__version__}
        return _json(version)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, TokenizeBody, self._intake)
        require_model(body.model, self._model)
        if body.messages is not None:
            token_ids = await self._model.encode_chat(
                [message.for_template() for message in body.messages],
                add_generation_prompt=body.add_generation_prompt is not False,
                add_special_tokens=bool(body.add_special_tokens),
                template_kwargs=body.chat_template_kwargs or {},
            )
        else:
            special = body.add_special_tokens is not False
            [token_ids] = await self._model.encode([body.prompt or ""], add_special_tokens=special)
        counts = to_json({"count": len(token_ids), "max_model_len": self._max_model_len()})
        to_str = self._model.tokenizer.token_str

        def answer() -> bytes:
            strs = list_to_json(token_ids, to_str) if body.return_token_strs else b"null"
            return b'%b,"tokens":%b,"token_strs":%b}' % (counts[:-1], list_to_json(token_ids, lambda each: each), strs)

        text = await self._model.threads.run(len(token_ids), answer)
        return web.Response(body=text, content_type="application/json")

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, DetokenizeBody, self._intake)
        require_model(body.model, self._model)
        limit = max(self._model.max_position_embeddings, self._max_model_len())
        if len(body.tokens) > limit:
            raise TooLarge(
                f"`tokens` has {len(body.tokens)} token ids, but the context holds {limit}. Send it in parts.",
                param="tokens",
            )
        check_token_ids(body.tokens, self._model.vocab_size, param="tokens")
        [text] = await self._model.decode([body.tokens])
        answer = await self._model.threads.run(len(text), lambda: b'{"prompt":%b}' % text_to_json(text))
        return web.Response(body=answer, content_type="application/json")

    def _card(self) -> Model:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "root": self._model.name,
            "parent": None,
            "max_model_len": self._max_model_len(),
        }


class OperatorApi:
    """/v1/cluster, /v1/requests and /v1/requests/{id}/trace, for the console, `pdserve status` and `pdserve trace`."""

    def __init__(self, cluster: Cluster, traces: Traces, gate: Gate, health: Health, store: Store) -> None:
        self._cluster = cluster
        self._traces = traces
        self._gate = gate
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
        workers = [worker for tier in TIERS for worker in self._cluster.directory.workers_of(tier)]
        return {
            "router": self.describe_router(),
            "redis": {"available": self._store.available},
            "workers": [_worker(worker) for worker in workers],
        }

    def describe_router(self) -> dict[str, object]:
        """The state of the router alone."""
        return {
            **self._health.describe(),
            "version": pdserve.__version__,
            "model": self._cluster.policy.model_name,
            "model_revision": self._cluster.policy.model_revision,
            "running": self._gate.num_admitted,
            "queued": self._gate.num_waiting,
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
    return web.Response(text=json.dumps(fields, ensure_ascii=False), content_type="application/json")
