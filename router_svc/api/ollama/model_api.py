"""/, /api/version, /api/tags, /api/ps and /api/show: what is known of the served models, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web

import pdserve
from router_svc.api.authentication import client_of
from router_svc.api.http_request import read_body
from router_svc.api.intake import Intake
from router_svc.api.json_pieces import to_json
from router_svc.api.models import ModelBackend, Models
from router_svc.api.ollama.answers import (
    Capability,
    OllamaDetails,
    OllamaModel,
    OllamaModelInfo,
    OllamaModels,
    OllamaRunningModels,
    OllamaVersion,
)
from router_svc.api.ollama.facts import ModelFacts
from router_svc.api.ollama.names import chosen_by_name
from router_svc.api.ollama.schema import OllamaShowBody
from router_svc.api.served_model import ServedModel
from router_svc.routing.cluster import TIERS

#: Options of this API, by the name of the model's default.
_OPTIONS = {"repetition_penalty": "repeat_penalty", "max_new_tokens": "num_predict"}


class OllamaModelApi:
    """/, /api/version, /api/tags, /api/ps and /api/show."""

    def __init__(self, models: Models, facts: Mapping[str, ModelFacts], intake: Intake) -> None:
        """`facts`: those of each model by its own name."""
        self._models = models
        self._facts = facts
        self._intake = intake

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.get("/", self._running_text),
            web.get("/api/version", self._version),
            web.get("/api/tags", self._tags),
            web.get("/api/ps", self._running),
            web.post("/api/show", self._show),
        ]

    async def _running_text(self, _: web.Request) -> web.Response:
        # Clients compare the text with this one, or look at the status alone.
        return web.Response(text="Ollama is running")

    async def _version(self, _: web.Request) -> web.Response:
        version: OllamaVersion = {"version": pdserve.__version__}
        return _json(version)

    async def _tags(self, request: web.Request) -> web.Response:
        listed: OllamaModels = {"models": [self._tag(*each) for each in self._models.listed(client_of(request))]}
        return _json(listed)

    def _tag(self, name: str, backend: ModelBackend) -> OllamaModel:
        facts, reported = self._facts[backend.name], _reported(backend)
        model: OllamaModel = {
            "name": name,
            "model": name,
            "modified_at": facts.modified_at,
            "details": _details(facts, reported),
        }
        if facts.weight_bytes is not None:
            model["size"] = facts.weight_bytes
        if reported:
            model["digest"] = reported[0]
        return model

    async def _running(self, request: web.Request) -> web.Response:
        running: OllamaRunningModels = {"models": []}
        for name, backend in self._models.listed(client_of(request)):
            reported = _reported(backend)
            if reported and backend.cluster.ready("decode"):
                running["models"].append(
                    {
                        "name": name,
                        "model": name,
                        "digest": reported[0],
                        "details": _details(self._facts[backend.name], reported),
                        "context_length": backend.max_model_len(),
                    }
                )
        return _json(running)

    async def _show(self, request: web.Request) -> web.Response:
        body = await read_body(request, OllamaShowBody, self._intake)
        backend = chosen_by_name(body.model, self._models, client_of(request))
        model, facts = backend.model, self._facts[backend.name]
        defaults = model.defaults.model_dump(exclude_none=True)
        shown: OllamaModelInfo = {
            "modified_at": facts.modified_at,
            "parameters": "\n".join(f"{_OPTIONS.get(name, name)} {value}" for name, value in defaults.items()),
            "template": model.template.source,
            "details": _details(facts, _reported(backend)),
            "model_info": facts.model_info(),
            "capabilities": _capabilities(model),
        }
        return _json(shown)


def _details(facts: ModelFacts, reported: Sequence[str]) -> OllamaDetails:
    config = facts.config
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": config.model_type,
        "families": [config.model_type],
        "parameter_size": facts.parameter_size,
        "quantization_level": facts.quantization_level(reported),
    }


def _capabilities(model: ServedModel) -> list[Capability]:
    messages, found = model.messages, list[Capability](["completion"])
    if messages.form is not None:
        found.append("tools")
    if messages.thinks:
        found.append("thinking")
    return found


def _reported(backend: ModelBackend) -> list[str]:
    """The fingerprint of the model as a worker reports it, and what has been done to its weights; empty: no worker.

    Decode workers come first, which compute most tokens.
    """
    workers = [worker for tier in reversed(TIERS) for worker in backend.cluster.workers_of(tier)]
    return workers[0].layout.model.split("/") if workers else []


def _json(fields: object) -> web.Response:
    return web.Response(body=to_json(fields), content_type="application/json")
