"""The model as the router sees it: name, tokenizer, chat template, defaults and limits, without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.base.errors import RequestError, SetupError
from pdserve.base.sampling import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.tokenizer import Tokenizer
from pdserve.model.tokenizer_file import read_tokenizer
from router_svc.api.text_threads import INLINE_CHARACTERS, TextThreads

#: Texts up to this size are tokenized without an estimate of their token count.
_ALWAYS_TOKENIZED_CHARACTERS = 100_000
#: Template work for a message without content, as a number of characters.
_MESSAGE_COST = 64
#: Far above any real default, and within the fields of a request to a worker.
_MAX_INTEGER = 2**31 - 1
#: Tokens by which a text may exceed the context before it is refused by a count in pieces, which is not exact.
_COUNT_MARGIN = 1.25


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
    threads: TextThreads = field(default_factory=TextThreads)

    @classmethod
    def load(cls, model_dir: Path, name: str, *, special_tokens_in_text: bool = True) -> ServedModel:
        """Reads tokenizer, chat template and configs. Raises `SetupError`."""
        config = ModelConfig.from_dir(model_dir)
        tokenizer = read_tokenizer(model_dir, special_tokens_in_text=special_tokens_in_text)
        # The event loop waits for no other process.
        inline = -1 if tokenizer.is_isolated else INLINE_CHARACTERS
        return cls(
            name=name,
            tokenizer=tokenizer,
            template=ChatTemplate.from_dir(model_dir),
            defaults=SamplingDefaults.from_dir(model_dir),
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            threads=TextThreads(inline_characters=inline),
        )

    def close(self) -> None:
        """Ends threads and processes after their current work."""
        self.threads.close()
        self.tokenizer.close()

    def require_plausible(self, text: str, *, param: str) -> None:
        """Raises `RequestError` for a text that cannot fit into the context, without tokenizing all of it.

        Call it in a thread: a long text is tokenized in pieces until they exceed the context.
        """
        limit = self.max_position_embeddings
        if len(text) <= _ALWAYS_TOKENIZED_CHARACTERS:
            return  # Tokenizing it is fast, and gives the exact number.
        at_least = len(text.encode(errors="replace")) // self.tokenizer.max_token_bytes
        if at_least < limit and len(text) > 2 * limit:
            counted = self.tokenizer.count_up_to(text, int(limit * _COUNT_MARGIN))
            at_least = max(at_least, int(counted / _COUNT_MARGIN))
        if at_least >= limit:
            raise RequestError(
                f"The prompt has at least {at_least} tokens, but the context holds {limit}, including the completion. "
                "Shorten the prompt.",
                param=param,
            )

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_model_len: int | None = None
    ) -> list[list[int]]:
        """Token ids of prompts. Long texts do not block the event loop.

        Raises `RequestError` at the first one that does not fit into the context, before the others are tokenized, and
        `Overloaded` when too many texts wait. Without `max_model_len`, a text may be longer than the context, but not
        beyond what is fast to tokenize.
        """

        def work() -> list[list[int]]:
            encoded = []
            for text in texts:
                self.require_plausible(text, param="prompt")
                literal = self.tokenizer.literal(text, param="prompt")
                encoded.append(self.tokenizer.encode(literal, add_special_tokens))
                if max_model_len is not None:
                    require_fits(len(encoded[-1]), max_model_len, param="prompt")
            return encoded

        return await self.threads.run(sum(map(len, texts)), work)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        template_kwargs: Mapping[str, bool | int | float | str],
    ) -> list[int]:
        """Token ids of a conversation. Raises `RequestError` if the template refuses it, or if there is no template."""

        def render() -> str:
            kept = [{name: self._literal(text, "messages") for name, text in each.items()} for each in messages]
            kwargs = {name: self._literal(value, "chat_template_kwargs") for name, value in template_kwargs.items()}
            return self.template.render(kept, add_generation_prompt=add_generation_prompt, **kwargs)

        def encode(text: str) -> list[int]:
            self.require_plausible(text, param="messages")
            return self.tokenizer.encode(text, add_special_tokens)

        size = _chat_size(messages, template_kwargs)
        if size > INLINE_CHARACTERS:
            return await self.threads.run(size, lambda: encode(render()))
        # A template may print much for little, so the size of its output decides again.
        text = render()
        return await self.threads.run(len(text), lambda: encode(text))

    def _literal(self, value: object, param: str) -> object:
        return self.tokenizer.literal(value, param=param) if isinstance(value, str) else value

    async def check_prompts(self, prompts: Sequence[Sequence[int]], max_model_len: int) -> None:
        """Raises `RequestError` for token ids that do not fit into the context, or are not in the vocabulary."""
        for prompt in prompts:
            require_fits(len(prompt), max_model_len, param="prompt")

        def check() -> None:
            for prompt in prompts:
                check_token_ids(prompt, self.vocab_size, param="prompt")

        await self.threads.run(sum(map(len, prompts)), check)

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The texts of token ids, special tokens included."""
        return await self.threads.run(
            sum(map(len, prompts)), lambda: [self.tokenizer.decode(token_ids, False) for token_ids in prompts]
        )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raises `RequestError` with the first id that is not in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"Token id {str(wrong)[:20]} is not in the vocabulary, which has ids 0 to {vocab_size - 1}.", param=param
        )


def require_fits(num_tokens: int, max_model_len: int, *, param: str) -> None:
    """Raises `RequestError` when a prompt leaves no space for a single token in the context."""
    if num_tokens >= max_model_len:
        raise RequestError(
            f"The prompt has {num_tokens} tokens, but the context holds {max_model_len}, including the completion. "
            "Shorten the prompt.",
            param=param,
        )


def _chat_size(
    messages: Sequence[Mapping[str, object]], template_kwargs: Mapping[str, bool | int | float | str]
) -> int:
    """Characters that a template has to handle. It may print each of its variables with every message."""
    variables = sum(len(name) + len(str(value)) for name, value in template_kwargs.items())
    texts = sum(len(str(message["content"])) + len(str(message.get("name", ""))) for message in messages)
    return texts + len(messages) * (_MESSAGE_COST + variables) + variables
