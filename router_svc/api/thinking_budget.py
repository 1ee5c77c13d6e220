"""The bound on an answer's thinking, from the client's number and the form of the model's messages."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.errors import RequestError
from pdserve.base.sampling import ThinkingBudget
from router_svc.api.served_model import ServedModel
from router_svc.messages.grammar import Thinking
from router_svc.messages.model_messages import ModelMessages, message_start
from router_svc.messages.parser import MessageParser

_PARAM = "thinking_token_budget"
#: The value that bounds nothing.
UNBOUNDED = -1


def can_bound_thinking(messages: ModelMessages) -> bool:
    """Whether the model thinks, and in a way that can be ended."""
    return messages.thinks and messages.form is not None and messages.form.thinking is not None


async def thinking_budget(
    model: ServedModel, max_tokens: int, thinking: Thinking, *, has_grammar: bool
) -> ThinkingBudget | None:
    """What workers get; None: nothing. `thinking`: how an answer may think. Raises `RequestError`.

    `has_grammar`: the answer has one, which also says whether there can be thinking.
    """
    if max_tokens == UNBOUNDED:
        return None
    form = model.messages.form
    if form is None or form.thinking is None or not can_bound_thinking(model.messages):
        raise RequestError(
            f"`{_PARAM}` needs a model with a think block, which the chat template and --message-format of this one "
            "do not have. Leave it out, or bound the answer with `max_tokens`.",
            param=_PARAM,
        )
    if has_grammar and thinking is Thinking.NONE:
        return None
    opening, closing = form.thinking
    closings = form.thinking_closings or (closing,)
    # The threads do this, since the tokenizer may be another process.
    token_ids = await model.threads.run(len(closings[0]), lambda: model.tokenizer.encode(closings[0], False))
    return ThinkingBudget(
        max_tokens=max_tokens,
        is_open=thinking is Thinking.OPENED,
        opening=opening,
        closings=closings,
        closing_token_ids=tuple(token_ids),
    )


async def budget_of_prompt(
    model: ServedModel, max_tokens: int | None, prompt: Sequence[int], *, has_grammar: bool
) -> ThinkingBudget | None:
    """As `thinking_budget`, for an output that is not read as a message. Raises `RequestError`."""
    if max_tokens is None or max_tokens == UNBOUNDED:
        return None
    if has_grammar:
        raise RequestError(
            f"`{_PARAM}` cannot be combined with structured output, whose grammar holds for the whole output. Send a "
            "chat over HTTP instead, whose thinking comes before it.",
            param=_PARAM,
        )

    def is_thinking() -> bool:
        form = model.messages.form
        if form is None:
            return False
        start = message_start(form, model.tokenizer, prompt)
        return MessageParser(form.template.only(calls=False, thinking=True), {}, prefix=start).is_thinking

    thinking = Thinking.OPENED if await model.threads.run(len(prompt), is_thinking) else Thinking.OPTIONAL
    return await thinking_budget(model, max_tokens, thinking, has_grammar=False)
