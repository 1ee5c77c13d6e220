"""The model as the router sees it: name, tokenizer, chat template, defaults and limits, without weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.base.errors import RequestError, SetupError
from pdserve.base.sampling import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.tokenizer import Tokenizer

Result = TypeVar("Result")

#: Texts up to this size are tokenized on the event loop. That takes well below 1 ms, less than a switch to a thread.
INLINE_CHARACTERS = 2048
#: Threads that tokenize longer texts. More would only take cores from the workers of a small machine.
_TEXT_THREADS = 2
#: Texts up to this size are tokenized without an estimate of their token count.
_ALWAYS_TOKENIZED_CHARACTERS = 100_000
#: Template work for a message without content, as a number of characters.
_MESSAGE_COST = 64
#: Far above any real default, and within the fields of a request to a worker.
_MAX_INTEGER = 2**31 - 1


class SamplingDefaults(BaseModel):
    """Fields of generation_config.json that apply to requests which omit them, as in vLLM, within the same bounds."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    temperature: Annotated[float, Ge(0), Le(MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(0), Le(_MAX_INTEGER)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Ge(MIN_REPETITION_PENALTY), Le(MAX_REPETITION_PENALTY)] | None = None
    #: Also the upper limit for requests, as in vLLM.
    max_new_tokens: Annotated[int, Ge(1), Le(_MAX_INTEGER)] | None = None

    @classmethod
    def from_dir(cls, model_dir: Path) -> SamplingDefaults:
        """All None when the model has no generation_config.json. Raises `SetupError`."""
        config = Fields.read_optional(model_dir / "generation_config.json")
        try:
            return cls.model_validate({name: config.raw(name) for name in cls.model_fields})
        except ValidationError as error:
            problems = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors(include_url=False))
            raise SetupError(f"{config.where} is invalid: {problems}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Everything the API layers need of the model."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    vocab_size: int
    max_position_embeddings: int
    threads: ThreadPoolExecutor

    @classmethod
    def load(cls, model_dir: Path, name: str) -> ServedModel:
        """Reads tokenizer, chat template and configs. Raises `SetupError`."""
        config = ModelConfig.from_dir(model_dir)
        return cls(
            name=name,
            tokenizer=Tokenizer.from_dir(model_dir),
            template=ChatTemplate.from_dir(model_dir),
            defaults=SamplingDefaults.from_dir(model_dir),
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            threads=ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text"),
        )

    def require_plausible(self, text: str, *, param: str) -> None:
        """Raises `RequestError` for a text that cannot fit into the context, without tokenizing it."""
        if len(text) <= _ALWAYS_TOKENIZED_CHARACTERS:
            return  # Tokenizing it is fast, and gives the exact number.
        at_least = len(text.encode(errors="replace")) // self.tokenizer.max_token_bytes
        if at_least >= self.max_position_embeddings:
            raise RequestError(
                f"The prompt has at least {at_least} tokens, but the context holds {self.max_position_embeddings}, "
                "including the completion. Shorten the prompt.",
                param=param,
            )

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of texts. Long texts do not block the event loop."""
        return await self._off_loop(
            sum(map(len, texts)), lambda: [self.tokenizer.encode(text, add_special_tokens) for text in texts]
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        template_kwargs: Mapping[str, bool | int | float | str],
    ) -> list[int]:
        """Token ids of a conversation. Raises `RequestError` if the template refuses it, or if there is no template."""

        def render_and_encode() -> list[int]:
            text = self.template.render(messages, add_generation_prompt=add_generation_prompt, **template_kwargs)
            self.require_plausible(text, param="messages")
            return self.tokenizer.encode(text, add_special_tokens)

        size = sum(_MESSAGE_COST + len(str(message["content"])) for message in messages)
        return await self._off_loop(size, render_and_encode)

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The texts of token ids, special tokens included."""
        return await self._off_loop(
            sum(map(len, prompts)), lambda: [self.tokenizer.decode(token_ids, False) for token_ids in prompts]
        )

    async def _off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)
