"""/v1/decisions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from pdserve.base.errors import RequestError, TransferError
from pdserve.base.sampling import SamplingParams
from router_svc.api.authentication import client_of
from router_svc.api.decisions.answers import DecisionUsage, answer_of
from router_svc.api.decisions.labels import Label, ModelLabels
from router_svc.api.decisions.prompts import DecisionPrompts
from router_svc.api.decisions.schema import DecisionBody, Question
from router_svc.api.generations import Endpoint
from router_svc.api.http_request import IDS, REQUEST_ID_HEADER
from router_svc.api.ids import Ids
from router_svc.api.json_pieces import to_json
from router_svc.api.models import ModelBackend
from router_svc.api.openai.shapes import in_slices
from router_svc.api.request_span import TRACE
from router_svc.api.responder import Responder, timeout_of
from router_svc.generation import Generation, TextRules
from router_svc.request.open_requests import OpenRequest
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage

_ENDPOINT = Endpoint(name="/v1/decisions", prompt_param="input")
_NO_TEXT = TextRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRequest:
    """Questions with their prompts, of which each has one token of output."""

    response_id: str
    created: int
    backend: ModelBackend
    questions: Sequence[Question]
    labels: Sequence[Sequence[Label]]
    generations: tuple[Generation, ...]


class DecisionsApi:
    """/v1/decisions."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._labels = {backend.name: ModelLabels(backend.model) for backend in responder.models}

    def routes(self) -> list[web.RouteDef]:
        """The endpoint for the application."""
        return [web.post("/v1/decisions", self._decisions)]

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        requests, client = self._responder.open, client_of(request)
        ids = Ids.make("dec-", request.headers.get(REQUEST_ID_HEADER))
        timeout = timeout_of(request, requests)
        async with requests.entered(ids.of_prompt(0), client.tenant, timeout) as opened:
            decision = await self._render(request, opened, ids)
            # From here on, error responses have the ids in a header, too.
            request[IDS] = ids
            opened.trace = request.get(TRACE)
            logprobs = [dict[int, float]() for _ in decision.generations]

            async def collect(deltas: list[ChoiceDelta]) -> None:
                for delta in deltas:
                    for entry in delta.logprobs:
                        logprobs[delta.choice_index].update(zip(entry.top_ids, entry.top_logprobs, strict=True))

            async with decision.backend.requests.run(decision.generations, client, opened) as stream:
                await stream.write_to(collect)
            _require_all(decision, logprobs)
            body = await in_slices(self._answer(decision, logprobs, stream.usage))
            return web.Response(body=body, content_type="application/json")

    async def _render(self, request: web.Request, opened: OpenRequest, ids: Ids) -> DecisionRequest:
        body = await self._responder.read(request, DecisionBody, opened)
        backend = self._responder.backend(request, body.model)
        try:
            return await self._request(body, backend, ids)
        except RequestError as error:
            # The conversation that the template gets is called the input here.
            if error.param is not None and error.param.startswith("messages"):
                raise type(error)(str(error).replace("`messages", "`input"), param="input") from error
            raise

    async def _request(self, body: DecisionBody, backend: ModelBackend, ids: Ids) -> DecisionRequest:
        prompts = await DecisionPrompts.of(body, backend.model)
        labels = await self._labels[backend.name].find(prompts.template_kwargs)
        of_questions = [labels.of(question, index) for index, question in enumerate(body.questions)]
        generations = []
        for index, each in enumerate(of_questions):
            prompt = await prompts.token_ids(index, each, backend.max_model_len())
            generations.append(
                Generation(
                    request_id=ids.of_prompt(index),
                    worker_request_id=ids.for_workers(index),
                    prompt=tuple(prompt),
                    sampling=_sampling(each),
                    text=_NO_TEXT,
                    first_choice=index,
                    priority=body.priority or 0,
                    cache_salt=(body.cache_salt or "").encode(),
                    endpoint=_ENDPOINT.name,
                )
            )
        return DecisionRequest(
            backend=backend,
            response_id=ids.response,
            created=int(time.time()),
            questions=body.questions,
            labels=of_questions,
            generations=tuple(generations),
        )

    def _answer(
        self, decision: DecisionRequest, logprobs: Sequence[Mapping[int, float]], usage: TokenUsage
    ) -> Iterator[bytes]:
        head = {"id": decision.response_id, "object": "decision", "created": decision.created}
        yield to_json({**head, "model": decision.backend.name})[:-1] + b',"answers":['
        for index, question in enumerate(decision.questions):
            yield b"," if index else b""
            yield to_json(answer_of(question, decision.labels[index], logprobs[index]))
        yield b'],"usage":%b}' % to_json(_usage(usage))


def _sampling(labels: Sequence[Label]) -> SamplingParams:
    """One token, with the log-probabilities of the labels' tokens. Which one it is does not matter."""
    token_ids = tuple(token_id for label in labels for token_id in label.token_ids)
    return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, logprob_token_ids=token_ids)


def _require_all(decision: DecisionRequest, logprobs: Sequence[Mapping[int, float]]) -> None:
    """Raises `TransferError` if a worker has left out a log-probability that was requested."""
    for generation, found in zip(decision.generations, logprobs, strict=True):
        if not found.keys() >= {*generation.sampling.logprob_token_ids}:
            raise TransferError("A worker answered without the log-probabilities of all labels. Retry the request.")


def _usage(usage: TokenUsage) -> DecisionUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
