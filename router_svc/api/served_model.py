"""The model as the router sees it: name, tokenizer, chat template, defaults and limits, without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.base.errors import ContextExceeded, RequestError
from pdserve.base.logs import get_logger
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.known_fields import check_directory
from pdserve.model.tokenizer import StreamDetokenizer, Tokenizer
from pdserve.model.tokenizer_file import read_tokenizer
from router_svc.api.chat_size import MESSAGE_COST, characters_of, chat_size
from router_svc.api.last_used import LastUsed
from router_svc.api.pooling.model_pooling import ModelPooling
from router_svc.api.sampling_defaults import SamplingDefaults
from router_svc.api.structured import StructuredFields, grammar_of, has_structure
from router_svc.api.text_threads import INLINE_CHARACTERS, LONG_CHARACTERS, TextThreads
from router_svc.message_formats import AUTO
from router_svc.messages.described_tools import text_of_content, with_described_tools
from router_svc.messages.model_messages import ModelMessages, messages_of

log = get_logger(__name__)

#: Text that is put behind the last message where the answer is to go on with that message.
_MARK = "end-of-the-last-message "
#: Texts up to this size are tokenized without an estimate of their token count.
_ALWAYS_TOKENIZED_CHARACTERS = 100_000
#: Factor by which a count in pieces, which is not exact, has to exceed the context before it refuses a text.
_COUNT_MARGIN = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Everything the API layers need of the model."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    vocab_size: int
    #: Tokens of the longest sequence that the model supports, and that workers have unless the operator sets it.
    max_context: int
    default_context: int
    #: The name that the model's files give its tokenizer.
    tokenizer_class: str = "PreTrainedTokenizerFast"
    messages: ModelMessages = field(default_factory=ModelMessages)
    pooling: ModelPooling = field(default_factory=ModelPooling)
    threads: TextThreads = field(default_factory=TextThreads)
    #: Grammars of chats with tools.
    grammars: LastUsed[str] = field(default_factory=lambda: LastUsed(64))
    #: Templates that came with requests.
    templates: LastUsed[ChatTemplate] = field(default_factory=lambda: LastUsed(8))
    #: Whether the template is the model's, and so renders short conversations fast.
    has_own_template: bool = True

    @classmethod
    def load(
        cls, model_dir: Path, name: str, *, special_tokens_in_text: bool = True, message_format: str = AUTO
    ) -> ServedModel:
        """Reads tokenizer, chat template and configs. Raises `SetupError`."""
        config = ModelConfig.from_dir(model_dir)
        if unknown := check_directory(model_dir):
            log.info("model_fields_unknown", model=name, **unknown)
        tokenizer = read_tokenizer(model_dir, special_tokens_in_text=special_tokens_in_text)
        # The event loop waits for no other process.
        inline = -1 if tokenizer.is_isolated else INLINE_CHARACTERS
        template = ChatTemplate.from_dir(model_dir)
        return cls(
            name=name,
            tokenizer=tokenizer,
            template=template,
            messages=messages_of(model_dir, template, message_format),
            defaults=SamplingDefaults.from_dir(model_dir),
            pooling=ModelPooling.from_dir(model_dir, config.hidden_size),
            vocab_size=config.vocab_size,
            max_context=config.max_context,
            default_context=config.default_context,
            tokenizer_class=_tokenizer_class(model_dir),
            threads=TextThreads(inline_characters=inline),
        )

    def close(self) -> None:
        """Ends threads and processes after their current work."""
        self.threads.close()
        self.tokenizer.close()

    def require_plausible(self, text: str, *, param: str) -> None:
        """Raises `ContextExceeded` for a text that cannot fit into the context, without tokenizing all of it.

        Call it in a thread: a long text is tokenized in pieces until they exceed the context.
        """
        limit = self.max_context
        if len(text) <= _ALWAYS_TOKENIZED_CHARACTERS:
            return  # Tokenizing it is fast, and gives the exact number.
        at_least = len(text.encode(errors="replace")) // self.tokenizer.max_token_bytes
        if at_least < limit and len(text) > 2 * limit:
            counted = self.tokenizer.count_up_to(text, int(limit * _COUNT_MARGIN))
            at_least = max(at_least, int(counted / _COUNT_MARGIN))
        if at_least >= limit:
            raise ContextExceeded(
                f"The prompt has at least {at_least} tokens, but the context holds {limit}, including the completion. "
                "Shorten the prompt.",
                param=param,
            )

    async def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        max_model_len: int | None = None,
        keep: int | None = None,
        param: str = "prompt",
    ) -> list[list[int]]:
        """Token ids of prompts, of each the last `keep`. Long texts do not block the event loop.

        Raises `RequestError` at the first one that does not fit into the context, before the others are tokenized, and
        `Overloaded` when too many texts wait. Without `max_model_len`, a text may be longer than the context, but not
        beyond what is fast to tokenize.
        """

        def work() -> list[list[int]]:
            encoded = []
            for text in texts:
                self.require_plausible(text, param=param)
                literal = self.tokenizer.literal(text, param=param)
                token_ids = self.tokenizer.encode(literal, add_special_tokens)
                encoded.append(token_ids if keep is None else token_ids[-keep:])
                if max_model_len is not None:
                    require_fits(len(encoded[-1]), max_model_len, param=param)
            return encoded

        return await self.threads.run(sum(map(len, texts)), work)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        template_kwargs: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] = (),
        continues: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. `continues`: they end within the last message.

        Raises `RequestError` if the template refuses it, or if there is no template.
        """

        def render() -> str:
            shown = list(tools) if self.messages.has_tools_in_template else []
            described = messages if self.messages.has_tools_in_template else with_described_tools(messages, tools)
            kept = [self._literal(each, "messages") for each in described]
            kwargs: dict[str, Any] = self._literal(dict(template_kwargs), "chat_template_kwargs")
            kwargs |= {"tools": self._literal(shown, "tools")} if shown else {}
            template = self.template.for_tools or self.template if shown else self.template
            kwargs["add_generation_prompt"] = add_generation_prompt
            text = template.render(_marked(kept) if continues else kept, **kwargs)
            return _before_mark(text) if continues else text

        def encode(text: str) -> list[int]:
            self.require_plausible(text, param="messages")
            return self.tokenizer.encode(text, add_special_tokens)

        # Thousands of messages take milliseconds to be counted.
        counting = MESSAGE_COST * len(messages)
        size = await self.threads.run(counting, lambda: chat_size(messages, template_kwargs) + characters_of(tools))
        if size > INLINE_CHARACTERS or not self.has_own_template:
            # Other templates count as long work, which leaves one of the threads free.
            size = size if self.has_own_template else max(size, LONG_CHARACTERS + 1)
            return await self.threads.run(size, lambda: encode(render()))
        # A template may print much for little, so the size of its output decides again.
        text = render()
        return await self.threads.run(len(text), lambda: encode(text))

    async def grammar_of(self, fields: StructuredFields) -> str:
        """What the output has to match; empty: anything. Raises `RequestError` for what cannot be enforced."""
        if not has_structure(fields):
            return ""
        # Never on the event loop: a short grammar can take long to check, too.
        return await self.threads.run(INLINE_CHARACTERS + 1, lambda: grammar_of(fields))

    def _literal(self, value: Any, param: str) -> Any:
        """The value, in which no text of the client is read as a special token."""
        match value:
            case str():
                return self.tokenizer.literal(value, param=param)
            case Mapping():
                return {self._literal(name, param): self._literal(each, param) for name, each in value.items()}
            case list():
                return [self._literal(each, param) for each in value]
            case _:
                return value

    async def bad_words(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens that each text can have in an output: at its start, and behind a space. Raises `RequestError`."""

        def work() -> tuple[tuple[int, ...], ...]:
            found: dict[tuple[int, ...], None] = {}
            for text in texts:
                word = self.tokenizer.literal(text.lstrip() or text, param="bad_words")
                for spelling in (word, f" {word}"):
                    found[tuple(self.tokenizer.encode(spelling, False))] = None
            if () in found:
                raise RequestError("`bad_words` has a text without tokens. Remove it.", param="bad_words")
            return tuple(found)

        return await self.threads.run(sum(map(len, texts)), work) if texts else ()

    async def check_prompts(
        self, prompts: Sequence[Sequence[int]], max_model_len: int, *, param: str = "prompt"
    ) -> None:
        """Raises `RequestError` for token ids that do not fit into the context, or are not in the vocabulary."""
        for prompt in prompts:
            require_fits(len(prompt), max_model_len, param=param)

        def check() -> None:
            for prompt in prompts:
                check_token_ids(prompt, self.vocab_size, param=param)

        await self.threads.run(sum(map(len, prompts)), check)

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The texts of token ids, special tokens included."""
        return [text + unfinished.decode(errors="replace") for text, unfinished in await self.decode_open(prompts)]

    async def decode_open(self, prompts: Sequence[Sequence[int]]) -> list[tuple[str, bytes]]:
        """As `decode`, but the bytes of an incomplete character at the end of each text are separate."""

        def decode(token_ids: Sequence[int]) -> tuple[str, bytes]:
            detokenizer = StreamDetokenizer(self.tokenizer, skip_special_tokens=False)
            return detokenizer.push(token_ids), detokenizer.unfinished

        return await self.threads.run(sum(map(len, prompts)), lambda: [decode(token_ids) for token_ids in prompts])


def _tokenizer_class(model_dir: Path) -> str:
    config = Fields.read_optional(model_dir / "tokenizer_config.json")
    return config.text("tokenizer_class", "PreTrainedTokenizerFast")


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raises `RequestError` with the first id that is not in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"Token id {str(wrong)[:20]} is not in the vocabulary, which has ids 0 to {vocab_size - 1}.", param=param
        )


def require_fits(num_tokens: int, max_model_len: int, *, param: str) -> None:
    """Raises `ContextExceeded` when a prompt leaves no space for a single token in the context."""
    if num_tokens >= max_model_len:
        raise ContextExceeded(
            f"The prompt has {num_tokens} tokens, but the context holds {max_model_len}, including the completion. "
            "Shorten the prompt.",
            param=param,
        )


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with a mark behind the last message. Raises `RequestError` if no answer can go on with it."""
    *others, last = messages
    content = last["content"]
    if last["role"] != "assistant" or not text_of_content(content).strip():
        raise _no_continuation()
    if isinstance(content, list):
        return [*others, {**last, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]}]
    return [*others, {**last, "content": content + _MARK}]


def _before_mark(text: str) -> str:
    """The prompt up to the mark. Raises `RequestError` if the template does not show the last message."""
    before, found, behind = text.rpartition(_MARK.rstrip())
    if not found:
        raise _no_continuation()
    # A template that has taken the space behind the mark would have taken what is in front of it, too.
    return before if behind.startswith(" ") else before.rstrip()


def _no_continuation() -> RequestError:
    return RequestError(
        "`continue_final_message` needs a last message of the assistant with content, which the template shows.",
        param="continue_final_message",
    )
