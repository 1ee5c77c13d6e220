"""What `LLM` and `AsyncLLM` share: the cluster, and requests from their parameters to their outputs."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from pdserve.base.errors import NotFound, PdserveError, SetupError
from pdserve.cli.router_client import normal_base_url
from pdserve.llm.assembly import Assembly
from pdserve.llm.calls import Calls
from pdserve.llm.outputs import RequestOutput
from pdserve.llm.private_cluster import PrivateCluster
from pdserve.llm.prompts import Conversation, Prompt
from pdserve.llm.retries import Retries
from pdserve.llm.router_http import RouterHttp
from pdserve.llm.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `LLM` and `AsyncLLM`."""

    model: str | None
    base_url: str | None = None
    api_key: str | None = None
    seed: int | None = 0
    overload_timeout_s: float = 600.0
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.base_url is not None and self.options:
            raise ValueError(
                f"{next(iter(self.options))!r} is an option of a cluster that is started here. With `base_url`, set "
                "it where that cluster is started."
            )
        if self.base_url is None and self.model is None:
            raise ValueError("Name a `model` to start a cluster for, or the `base_url` of one that runs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt or conversation with its parameters, and what identifies it."""

    prompt: Prompt | Conversation
    params: SamplingParams
    request_id: str
    #: That of the parameters, else derived from that of the `LLM`; None: the server chooses.
    seed: int | None
    priority: int = 0


class Client:
    """A cluster that runs, or one of its own, which `open` starts and `close` ends. For one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Raises `TypeError` for an unknown option, and `SetupError` for an address that is none."""
        self._settings = settings
        self._cluster: PrivateCluster | None = None
        self._http: RouterHttp | None = None
        if settings.base_url is None:
            self._cluster = PrivateCluster(settings.model or "", settings.options)
        else:
            self._http = RouterHttp(normal_base_url(settings.base_url), settings.api_key)
        #: Those that `close` ends. `LLM` ends its own.
        self.calls = Calls()
        self._card: dict[str, Any] = {}
        self._run = secrets.token_hex(4)
        self._count = 0

    async def open(self, on_status: Callable[[str], None] = lambda _: None) -> None:
        """Returns when there is a server that answers.

        Raises `PeerLost` when it does not, `NotFound` when it serves another model, and `SetupError` when a cluster
        cannot be started.
        """
        if self._cluster is not None:
            await self._cluster.start(on_status)
            self._http = RouterHttp(self._cluster.base_url, self._cluster.api_key)
        try:
            self._card = self._chosen(await self._read_cards())
        except BaseException:
            await self._release()
            raise

    async def close(self) -> None:
        """Ends running calls, which raise `ShutDown`, and a cluster of its own. Idempotent."""
        await self.calls.end()
        await self._release()

    async def _release(self) -> None:
        try:
            if self._http is not None:
                await self._http.close()
        finally:
            if self._cluster is not None:
                await self._cluster.stop()

    def abandon(self) -> None:
        """Has a cluster of its own end soon, from any thread and without an event loop."""
        if self._cluster is not None:
            self._cluster.abandon()

    @property
    def http(self) -> RouterHttp:
        """The server. Raises `RuntimeError` before `open`."""
        if self._http is None:
            raise RuntimeError("The cluster is not started. Use `async with`, or call `start` first.")
        return self._http

    @property
    def model(self) -> str:
        """The name under which the server has the model."""
        return str(self._card["id"])

    async def tokenizer_info(self) -> Any:
        """What the server says of the model's tokenizer."""
        return await self.get(f"/tokenizer_info?{urlencode({'model': self.model})}")

    def default_params(self) -> SamplingParams:
        """The model's own sampling parameters, else vLLM's defaults."""
        fields = dict(self._card.get("default_sampling_params") or {})
        if "max_new_tokens" in fields:
            fields["max_tokens"] = fields.pop("max_new_tokens")
        return SamplingParams(**fields)

    def request(
        self, prompt: Prompt | Conversation, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> Request:
        """The next request, whose seed depends on how many there were before it."""
        number, self._count = self._count, self._count + 1
        seed = params.seed if params.seed is not None else derived_seed(self._settings.seed, number)
        chosen = request_id or f"llm-{self._run}-{number}"
        return Request(prompt=prompt, params=params, request_id=chosen, seed=seed, priority=priority)

    async def get(self, path: str) -> Any:
        """The JSON of `GET path`, tried again as `outputs` is."""
        return await self._retried(lambda: self.http.get(path))

    async def post(self, path: str, body: Mapping[str, Any], request_id: str | None = None) -> Any:
        """The JSON of `POST path`, tried again as `outputs` is."""
        return await self._retried(lambda: self.http.post(path, body, request_id))

    async def outputs(self, request: Request) -> AsyncGenerator[Assembly, None]:
        """The request's answer so far, each time that it has grown; with `FINAL_ONLY`, once.

        Waits while the server is overloaded. As long as there is no output, lost connections are tried again.
        """
        retries = Retries(self._settings.overload_timeout_s)
        while True:
            assembly = self.assembly(request)
            started = False
            try:
                request = await self._with_max_tokens(request)
                body = self._body(request)
                async with aclosing(self.http.answers(request.prompt.path, body, request.request_id)) as answers:
                    async for answer in answers:
                        if assembly.add(answer):
                            started = True
                            yield assembly
                return
            except PdserveError as error:
                if started:
                    raise
                pause_s = retries.pause_s(error)
            await asyncio.sleep(pause_s)

    def assembly(self, request: Request) -> Assembly:
        """The request's answer before it has anything."""
        return Assembly(
            request_id=request.request_id,
            prompt=request.prompt.text,
            n=request.params.n,
            num_logprobs=request.params.logprobs,
            seed=request.seed,
        )

    async def final(self, request: Request) -> RequestOutput:
        """The whole output of a request."""
        request = replace(request, params=replace(request.params, output_kind=RequestOutputKind.FINAL_ONLY))
        async with aclosing(self.outputs(request)) as outputs:
            [output] = [assembly.output() async for assembly in outputs]
        return output

    async def _retried(self, send: Callable[[], Awaitable[Any]]) -> Any:
        retries = Retries(self._settings.overload_timeout_s)
        while True:
            try:
                async with self.calls.running():
                    return await send()
            except PdserveError as error:
                pause_s = retries.pause_s(error)
            async with self.calls.running():
                await asyncio.sleep(pause_s)

    async def _read_cards(self) -> list[dict[str, Any]]:
        """The models of the server, at least one."""
        answer = await self.http.get("/v1/models")
        try:
            cards = [{"id": card["id"], "max_model_len": card["max_model_len"], **card} for card in answer["data"]]
        except (LookupError, TypeError):
            cards = []
        if not cards:
            raise PdserveError(f"{self.http.base_url}/v1/models does not answer as pdserve does.")
        return cards

    def _chosen(self, cards: list[dict[str, Any]]) -> dict[str, Any]:
        """The model that is wanted. A server of our own has one."""
        wanted, names = self._settings.model, ", ".join(repr(card["id"]) for card in cards)
        if self._cluster is not None or (wanted is None and len(cards) == 1):
            return cards[0]
        if wanted is None:
            raise SetupError(f"{self.http.base_url} serves {names}. Choose one with `model`.")
        found = next((card for card in cards if card["id"] == wanted), None)
        if found is None:
            hint = "Omit `model`." if len(cards) == 1 else "Choose one of them."
            raise NotFound(f"{self.http.base_url} serves {names}, not {wanted!r}. {hint}")
        return found

    def _body(self, request: Request) -> dict[str, Any]:
        params = request.params
        body = {"model": self.model, **params.as_fields(), **request.prompt.fields(params), "return_token_ids": True}
        if request.seed is not None:
            body["seed"] = request.seed
        if request.priority:
            body["priority"] = request.priority
        if params.output_kind is not RequestOutputKind.FINAL_ONLY:
            if params.prompt_logprobs is not None:
                raise ValueError("`prompt_logprobs` are not streamed. Set `output_kind` to FINAL_ONLY.")
            options = {"include_usage": True, "continuous_usage_stats": True}
            body |= {"stream": True, "stream_options": options}
        return body

    async def _with_max_tokens(self, request: Request) -> Request:
        """A completion without `max_tokens` takes the rest of the context, as a chat does by itself."""
        prompt, params = request.prompt, request.params
        if params.max_tokens is not None or isinstance(prompt, Conversation):
            return request
        token_ids = prompt.token_ids
        if token_ids is None:
            token_ids = (await self.http.post("/tokenize", {"model": self.model, "prompt": prompt.text}))["tokens"]
        kept = len(token_ids)
        if params.truncate_prompt_tokens is not None and params.truncate_prompt_tokens > 0:
            kept = min(kept, params.truncate_prompt_tokens)
        # One token at least, so that a prompt that is too long is refused for what it is.
        left = max(1, int(self._card["max_model_len"]) - kept)
        return replace(request, prompt=replace(prompt, token_ids=token_ids), params=replace(params, max_tokens=left))


def derived_seed(seed: int | None, number: int) -> int | None:
    """The seed of the request with this number, from 0, of an `LLM`; None for an `LLM` without a seed.

    A hash, so that requests of neighbouring seeds have nothing in common.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
