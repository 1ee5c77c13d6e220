"""`AsyncLLM`: outputs as they are generated, with vLLM's names."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from typing_extensions import Unpack

from pdserve.llm.assembly import Assembly
from pdserve.llm.client import Client, Request, Settings
from pdserve.llm.embedder import Embedder
from pdserve.llm.errors import ShutDown
from pdserve.llm.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from pdserve.llm.pooling_params import PoolingParams
from pdserve.llm.prompts import ChatOptions, Conversation, Message, Prompt, PromptType, to_conversations, to_prompt
from pdserve.llm.sampling_params import RequestOutputKind, SamplingParams
from pdserve.llm.tokenizer import AsyncTokenizer

#: Requests of one call of `embed` or `score` at a time.
_MAX_CONCURRENT_EMBEDDINGS = 128


class _Running:
    """A request that runs, which can be aborted while it waits for its next output."""

    def __init__(self) -> None:
        self.aborted = False
        self._wait: asyncio.Timeout | None = None

    def abort(self) -> None:
        """Ends the wait, or the next one. Idempotent."""
        if not self.aborted and self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())
        self.aborted = True

    async def next(self, answers: AsyncGenerator[Assembly, None]) -> Assembly | None:
        """The next answer; None at the end, or when it was aborted."""
        try:
            async with asyncio.timeout(0 if self.aborted else None) as self._wait:
                return await anext(answers, None)
        except TimeoutError:
            if not self.aborted:
                raise
            return None
        finally:
            self._wait = None


class AsyncLLM:
    """A model to which a program gives prompts, on a cluster of its own or, with `base_url`, on one that runs.

        async with AsyncLLM("smollm2-135m-instruct") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8), "request-1"):
                print(output.outputs[0].text)

    For one event loop. A cluster of its own starts with the `async with` block, with `start`, or with the first
    request, and ends with the block, with `shutdown`, and with the process.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        seed: int | None = 0,
        overload_timeout_s: float = 600.0,
        **options: object,
    ) -> None:
        """The arguments are those of `LLM`. Raises `TypeError` or `ValueError` for an option that is wrong."""
        settings = Settings(
            model=model,
            base_url=base_url,
            api_key=api_key,
            seed=seed,
            overload_timeout_s=overload_timeout_s,
            options=options,
        )
        self._client = Client(settings)
        self._embedder = Embedder(self._client, _MAX_CONCURRENT_EMBEDDINGS)
        self._running: dict[str, _Running] = {}
        self._start_lock = asyncio.Lock()
        self._is_started = False
        self._finalizer = weakref.finalize(self, self._client.abandon)

    async def start(self) -> None:
        """Starts the cluster, or connects to the one at `base_url`; does nothing if that is done. Raises as `LLM`."""
        async with self._start_lock:
            if not self._finalizer.alive:
                raise ShutDown
            if not self._is_started:
                async with self._client.calls.running():
                    await self._client.open()
                self._is_started = True

    async def shutdown(self) -> None:
        """Ends the cluster that was started with all its processes. Idempotent.

        Calls that run raise `ShutDown`, also with `base_url`.
        """
        self._finalizer.detach()
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt; the outputs have what `sampling_params.output_kind` says.

        Args:
            prompt: a text, token ids, or a dict with `prompt` or `prompt_token_ids` and perhaps `cache_salt`.
            sampling_params: None: the model's defaults.
            request_id: for `abort` and `pdserve trace`; letters, digits, `.`, `_`, `-`. None makes one.
            priority: lower values are admitted first, where the router orders by it.

        Leaving the iteration ends the request. Raises `ValueError` if the prompt or a parameter is wrong, and
        `PdserveError` if the request fails.
        """
        async with aclosing(self._stream(to_prompt(prompt), sampling_params, request_id, priority)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a conversation, as `generate` continues a prompt. The options are those of `LLM.chat`."""
        conversations = to_conversations(messages, options)
        if len(conversations) != 1:
            raise ValueError(f"AsyncLLM.chat takes one conversation (got {len(conversations)}). Call it for each.")
        async with aclosing(self._stream(conversations[0], sampling_params, request_id, 0)) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, as `LLM.embed` returns them."""
        requests = self._embedder.requests(prompts, pooling_params)
        await self.start()
        return await self._embedder.embed(requests)

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair, as `LLM.score` returns them."""
        pairs = self._embedder.pairs(data_1, data_2, pooling_params)
        await self.start()
        return await self._embedder.score(pairs)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests. Each has one more output, with `finish_reason` `abort`. Unknown ids are ignored."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if each in self._running:
                self._running[each].abort()

    async def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling parameters, which `generate` takes where none are given."""
        await self.start()
        return self._client.default_params()

    async def get_tokenizer(self) -> AsyncTokenizer:
        """The server's tokenizer."""
        await self.start()
        return AsyncTokenizer(self._client, await self._client.tokenizer_info())

    async def _stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.start()
        params = sampling_params or self._client.default_params()
        request = self._client.request(prompt, params, request_id=request_id, priority=priority)
        if request.request_id in self._running:
            raise ValueError(f"Request {request.request_id!r} runs already. Give each its own `request_id`.")
        running = self._running[request.request_id] = _Running()
        try:
            async for output in self._outputs(request, running):
                yield output
        finally:
            del self._running[request.request_id]

    async def _outputs(self, request: Request, running: _Running) -> AsyncGenerator[RequestOutput, None]:
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        assembly = self._client.assembly(request)
        async with aclosing(self._client.outputs(request)) as answers:
            while True:
                async with self._client.calls.running():
                    grown = await running.next(answers)
                if grown is None:
                    break
                assembly = grown
                yield assembly.delta() if is_delta else assembly.output()
        if running.aborted and not assembly.finished:
            assembly.abort()
            yield assembly.delta() if is_delta else assembly.output()
