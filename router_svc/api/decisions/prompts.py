"""The prompts of questions: the input as a conversation, and behind it the question with its possible answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdserve.base.errors import RequestError, TooLarge
from router_svc.api.chat_size import chat_size
from router_svc.api.decisions.labels import Label
from router_svc.api.decisions.schema import Choice, DecisionBody, Predicate, Question
from router_svc.api.openai.chat_prompt import chat_prompt, template_kwargs_of
from router_svc.api.openai.chat_reading import chat_reading, thinking_of
from router_svc.api.openai.messages import ChatMessage
from router_svc.api.openai.schema import ChatBody
from router_svc.api.openai.tools import ToolUse
from router_svc.api.parse import validate
from router_svc.api.responses.conversation import chat_messages
from router_svc.api.served_model import ServedModel, require_fits
from router_svc.api.text_threads import INLINE_CHARACTERS
from router_svc.messages.grammar import Thinking

#: Characters of the input times questions of one request. All of them are tokenized.
MAX_CHARACTERS = 8_388_608
_NO_TOOLS = ToolUse()


class DecisionPrompts:
    """The prompts of one request. They are equal up to the question, so workers compute a long input once."""

    def __init__(self, body: DecisionBody, chat: ChatBody, model: ServedModel) -> None:
        self._body = body
        self._chat = chat
        self._model = model

    @classmethod
    async def of(cls, body: DecisionBody, model: ServedModel) -> DecisionPrompts:
        """Raises `RequestError`, and `TooLarge` for a long input with many questions."""
        messages = chat_messages(None, body.input)
        fields = {
            "model": body.model,
            "messages": messages,
            # The answer is the first token, before which nothing can be thought.
            "reasoning_effort": "none",
            "chat_template_kwargs": body.chat_template_kwargs,
        }
        characters = chat_size(messages, body.chat_template_kwargs or {}) * len(body.questions)
        if characters > MAX_CHARACTERS:
            raise TooLarge(
                f"{len(body.questions)} questions about this input are {characters} characters of prompts, more than "
                f"{MAX_CHARACTERS}. Split the request.",
                param="questions",
            )
        chat = await model.threads.run(INLINE_CHARACTERS + 1, lambda: validate(ChatBody, fields))
        return cls(body, chat, model)

    @property
    def template_kwargs(self) -> dict[str, bool | int | float | str]:
        """The variables of the template."""
        return template_kwargs_of(self._chat)

    async def token_ids(self, index: int, labels: Sequence[Label], max_model_len: int) -> list[int]:
        """The prompt of a question. Raises `RequestError`."""
        question = self._body.questions[index]
        messages = with_question(self._chat.messages, question_text(question, labels))
        chat = self._chat.model_copy(update={"messages": messages})
        prompt = await chat_prompt(chat, self._model, _NO_TOOLS, None)
        require_fits(len(prompt), max_model_len, param="input")
        reading = chat_reading(self._model, _NO_TOOLS, prompt, shows_thinking=False)
        if reading is not None and thinking_of(reading) is Thinking.OPENED:
            raise RequestError(
                "The chat template of this model has it think before it answers, so the first token is no decision. "
                "Send `chat_template_kwargs` with which it does not, if there are any, or use another model.",
                param="chat_template_kwargs",
            )
        return prompt


def with_question(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """The conversation with a question at its end. Templates want turns, so one of the user goes on."""
    if messages and messages[-1].role == "user":
        last = messages[-1]
        return [*messages[:-1], last.model_copy(update={"content": f"{last.content}\n\n{text}"})]
    return [*messages, ChatMessage(role="user", content=text)]


def question_text(question: Question, labels: Sequence[Label]) -> str:
    """What the model reads of a question."""
    if isinstance(question, Predicate):
        return f"{question.instructions}\nIs this true? Answer with only yes or no."
    if isinstance(question, Choice):
        options = [(_shown(each.value), each.description) for each in question.choices]
        return "\n".join(_lines(question.instructions, labels, options, "letter of the best answer"))
    options = [(each.label, each.description) for each in question.levels]
    return "\n".join(_lines(question.instructions, labels, options, "number of the best level"))


def _lines(
    instructions: str, labels: Sequence[Label], options: Sequence[tuple[str, str | None]], wanted: str
) -> Iterable[str]:
    yield instructions
    for label, (name, description) in zip(labels, options, strict=True):
        yield f"{label.text}: {name} ({description})" if description else f"{label.text}: {name}"
    yield f"Answer with only the {wanted}."


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()
