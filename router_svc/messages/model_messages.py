"""How one model writes messages, found from its files unless the operator names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.fields import Fields
from pdserve.model.tokenizer import Tokenizer
from router_svc.message_formats import AUTO, FORMAT_NAMES, NONE
from router_svc.messages.formats import FORMATS, MessageFormat
from router_svc.messages.template import read_template

log = get_logger(__name__)

#: Tokens of a prompt's end in which the start of the assistant's message is looked for, one after the other.
_WINDOWS = (64, 1024, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMessages:
    """How the model writes messages. `form` None: as plain text."""

    form: MessageFormat | None = None
    #: Whether the model thinks before it answers.
    thinks: bool = False
    #: Whether the template shows tools. If not, they are described in the system message.
    has_tools_in_template: bool = False
    #: Whether the template refuses messages with several calls.
    has_single_calls: bool = False

    @property
    def thinking_form(self) -> MessageFormat | None:
        """The form of messages without tools; None: they are plain text."""
        return self.form if self.thinks else None

    def with_template(self, template: ChatTemplate) -> ModelMessages:
        """The same form, with what follows from another chat template."""
        return _messages(self.form, template)


#: What only templates of a family have, in the order in which it is looked for.
_SIGNS: Sequence[tuple[str, str]] = (
    ("<|channel|>", "gpt_oss"),
    ("<function=", "qwen3_coder"),
    ("```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("[ARGS]", "mistral"),
    ("[TOOL_CALLS]", "mistral_list"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
    ("<｜Assistant｜>", "deepseek_v31"),
)


def messages_of(model_dir: Path, chat_template: ChatTemplate, name: str) -> ModelMessages:
    """How the model of this directory and chat template writes messages. `name`: the value of `--message-format`.

    Raises `SetupError` for a name that does not exist.
    """
    shows_tools = chat_template.for_tools or chat_template
    return _messages(_form_of(model_dir, shows_tools.source, name), chat_template)


def _messages(form: MessageFormat | None, chat_template: ChatTemplate) -> ModelMessages:
    shows_tools = chat_template.for_tools or chat_template
    return ModelMessages(
        form=form,
        thinks=form is not None and _thinks(form, chat_template.source),
        has_tools_in_template="tools" in shows_tools.variables,
        has_single_calls="single tool-calls" in shows_tools.source,
    )


def _form_of(model_dir: Path, template: str, name: str) -> MessageFormat | None:
    if name == NONE or not template:
        return None
    if name != AUTO:
        if name not in FORMATS:
            raise SetupError(f"--message-format: {name!r} is none of {', '.join((AUTO, NONE, *FORMAT_NAMES))}.")
        return FORMATS[name]
    # A model of no known family is told in its prompt to write calls as hermes.
    found = next((form for sign, form in _SIGNS if _has_sign(template, sign, form)), "hermes")
    return _described(model_dir) or FORMATS[found]


def _has_sign(template: str, sign: str, form: str) -> bool:
    return sign in template and (form != "deepseek_v3" or "<｜tool▁" in template)


def _thinks(form: MessageFormat, template: str) -> bool:
    if form.thinking is None:
        return form.template.has_thinking and form.calls is None  # The form is only described.
    return any(delimiter in template for delimiter in form.thinking)


def _described(model_dir: Path) -> MessageFormat | None:
    """The form that the model's own files describe, if they do."""
    config = Fields.read_optional(model_dir / "tokenizer_config.json")
    description = config.raw("response_template")
    if not isinstance(description, Mapping):
        return None
    try:
        template = read_template(description, f"response_template in {config.where}")
    except SetupError as error:
        log.warning("response_template_not_used", reason=error)
        return None
    form = MessageFormat(name="response_template", template=template)
    same = (each for each in FORMATS.values() if each.template.regions == template.regions)
    return next((replace(each, template=template) for each in same), form)


def message_start(form: MessageFormat, tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """What the prompt already has of the assistant's message, such as the delimiter that opens thinking."""
    for window in _WINDOWS:
        text = tokenizer.decode(prompt[-window:], False)
        found = list(form.template.anchor.finditer(text))
        if found:
            return text[found[-1].end() :]
        if window >= len(prompt):
            break
    return ""


def kept_tokens(form: MessageFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that mean something in the form."""
    delimiters = form.template.delimiters
    return tuple(token for text, token in tokenizer.special_tokens.items() if text and text in delimiters)
