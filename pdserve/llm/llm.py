"""`LLM`: batches of prompts from a script, with vLLM's names."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from typing_extensions import Unpack

from pdserve.llm.batch import run_all
from pdserve.llm.client import Client, Request, Settings
from pdserve.llm.embedder import Embedder
from pdserve.llm.loop_thread import LoopThread
from pdserve.llm.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from pdserve.llm.pooling_params import PoolingParams
from pdserve.llm.progress import MakeBar, progress_bar, start_display
from pdserve.llm.prompts import (
    ChatOptions,
    Conversation,
    Message,
    Prompt,
    PromptType,
    to_conversations,
    to_each,
    to_prompts,
)
from pdserve.llm.sampling_params import SamplingParams
from pdserve.llm.tokenizer import AsyncTokenizer

#: Two full batches of a decode worker with its default settings.
_MAX_CONCURRENT_REQUESTS = 128
_ParamsOf = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model to which a script gives prompts, on a cluster of its own or, with `base_url`, on one that runs.

        with LLM("smollm2-135m-instruct") as llm:
            outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))

    A cluster of its own is the one that `pdserve up` starts; `shutdown`, the end of the `with` block and the end of the
    process, however it comes, end it. All methods block, and may be called from several threads, also while an event
    loop runs, as in notebooks.

    Args:
        model: name, directory, .gguf file or hub id. With `base_url` it may be omitted, else it must be served.
        base_url: such as `http://127.0.0.1:8000`; None starts a cluster on this machine.
        api_key: for `base_url`; default: the first one in `PDSERVE_API_KEY`.
        seed: of all prompts that have none in their parameters: with the same one, a script gets the same outputs
            again. None: the server chooses seeds.
        max_concurrent_requests: requests at a time; more wait here.
        overload_timeout_s: how long a request is sent again to a server that is overloaded.
        options: flags of `pdserve up` with underscores, such as `max_model_len=4096` or `dtype="float32"`.

    Raises:
        SetupError: the cluster cannot start, or the address is none.
        PeerLost: nothing answers at `base_url`.
        NotFound: it serves another model.
        TypeError, ValueError: an option is unknown, or does not fit the others.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        seed: int | None = 0,
        max_concurrent_requests: int = _MAX_CONCURRENT_REQUESTS,
        overload_timeout_s: float = 600.0,
        **options: object,
    ) -> None:
        """Starts the cluster, or connects to the one at `base_url`. Raises what the class says."""
        if max_concurrent_requests < 1:
            raise ValueError(f"`max_concurrent_requests` is {max_concurrent_requests}, but must be at least 1.")
        settings = Settings(
            model=model,
            base_url=base_url,
            api_key=api_key,
            seed=seed,
            overload_timeout_s=overload_timeout_s,
            options=options,
        )
        self._limit = max_concurrent_requests
        self._client = Client(settings)
        self._embedder = Embedder(self._client, max_concurrent_requests)
        self._loop = LoopThread()
        # Also when it is forgotten, or the interpreter ends.
        self._finalizer = weakref.finalize(self, _shut_down, self._client, self._loop)
        try:
            with start_display(model if base_url is None else None) as on_status:
                self._loop.call(self._client.open(on_status))
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: _ParamsOf = None,
        *,
        use_tqdm: bool | MakeBar = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts: texts, token ids, or dicts with `prompt` or `prompt_token_ids` and perhaps `cache_salt`.

        Args:
            prompts: one or several.
            sampling_params: for all, or one per prompt; None: the model's defaults.
            use_tqdm: whether there is a progress bar, or a class with tqdm's interface.
            priority: one per prompt; lower values are admitted first, where the router orders by it.

        Returns one result per prompt, in their order. Ctrl-C cancels all of them.

        Raises:
            ValueError: a prompt or a parameter is wrong; `PromptRefused`, which has its `index`, where the server says
                so. The other prompts are cancelled.
            PdserveError: a prompt could not be completed: `PromptFailed`, which has its `index`, if there are several.
        """
        return self._run(to_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: _ParamsOf = None,
        *,
        use_tqdm: bool | MakeBar = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answers one conversation or several, as `generate` continues prompts, with the model's chat template.

        Args:
            messages: a list of messages as in the HTTP API, or a list of such lists.
            sampling_params: for all, or one per conversation; None: the model's defaults.
            use_tqdm: whether there is a progress bar, or a class with tqdm's interface.
            options: fields of chats over HTTP: `add_generation_prompt` (default True), `continue_final_message` (needs
                the former to be False), `tools`, `tool_choice`, `parallel_tool_calls`, `documents`, `reasoning_effort`,
                `include_reasoning`, `chat_template_kwargs`, and where the server takes it, `chat_template`.
        """
        return self._run(to_conversations(messages, options), sampling_params, use_tqdm, None)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, in their order. Prompts, errors and Ctrl-C are as those of `generate`."""
        requests = self._embedder.requests(prompts, pooling_params)
        with progress_bar(len(requests), use_tqdm) as on_result:
            return self._loop.call(self._embedder.embed(requests, on_result))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """The cosine of the embeddings of each pair of texts: one with each of `data_2`, or as many with as many.

        A text of several pairs is embedded once. The `index` of an error is that of the first pair with the text.
        """
        pairs = self._embedder.pairs(data_1, data_2, pooling_params)
        with progress_bar(len(pairs.requests), use_tqdm) as on_result:
            return self._loop.call(self._embedder.score(pairs, on_result))

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling parameters, which `generate` takes where none are given."""
        return self._client.default_params()

    def get_tokenizer(self) -> Tokenizer:
        """The server's tokenizer."""
        info = self._loop.call(self._client.tokenizer_info())
        return Tokenizer(AsyncTokenizer(self._client, info), self._loop, self)

    @property
    def model(self) -> str:
        """The name under which the server has the model."""
        return self._client.model

    @property
    def base_url(self) -> str:
        """The address of the server."""
        return self._client.http.base_url

    def shutdown(self) -> None:
        """Ends the cluster that was started, and returns when its processes have ended. Idempotent.

        Calls of other threads that wait, and later ones, raise `ShutDown`.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: Sequence[Prompt | Conversation],
        sampling_params: _ParamsOf,
        use_tqdm: bool | MakeBar,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        given = self._client.default_params() if sampling_params is None else sampling_params
        params = to_each(given, SamplingParams, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"There are {len(prompts)} prompts and {len(priority)} priorities. Give one per prompt.")
        priorities = priority or [0] * len(prompts)
        requests: list[Request] = [
            self._client.request(prompt, own, priority=rank)
            for prompt, own, rank in zip(prompts, params, priorities, strict=True)
        ]
        with progress_bar(len(requests), use_tqdm) as on_result:
            return self._loop.call(run_all(self._client, requests, self._limit, on_result))


def _shut_down(client: Client, loop: LoopThread) -> None:
    if not loop.is_forked:  # Else it is the other process's.
        loop.close(client.close())


class Tokenizer:
    """`AsyncTokenizer` for blocking callers."""

    def __init__(self, tokenizer: AsyncTokenizer, loop: LoopThread, owner: LLM) -> None:
        """`owner`: is not forgotten, and so not shut down, as long as its tokenizer is used."""
        self._tokenizer = tokenizer
        self._loop = loop
        self._owner = owner
        self.vocab_size = tokenizer.vocab_size
        self.bos_token = tokenizer.bos_token
        self.eos_token = tokenizer.eos_token
        self.eos_token_ids = tokenizer.eos_token_ids
        self.chat_template = tokenizer.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._loop.call(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises `PromptRefused` for ids beyond the vocabulary."""
        return self._loop.call(self._tokenizer.decode(token_ids))

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: object,
    ) -> list[int]:
        """Token ids of a conversation, as `chat` sends them to the model."""
        work = self._tokenizer.apply_chat_template(
            conversation, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self._loop.call(work)
