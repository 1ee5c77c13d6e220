"""The prompt of a chat: its conversation as the model's template shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.base.errors import RequestError
from router_svc.api.chat_size import MESSAGE_COST
from router_svc.api.openai.messages import ChatMessage
from router_svc.api.openai.schema import ChatBody, TokenizeBody
from router_svc.api.openai.tools import ToolUse, tool_use
from router_svc.api.served_model import ServedModel


async def count_chat(body: ChatBody, model: ServedModel) -> int:
    """The number of tokens of a chat's prompt. Raises `RequestError`."""
    return len(await chat_prompt(body, model, chat_tool_use(body, model), None))


def chat_tool_use(body: ChatBody, model: ServedModel) -> ToolUse:
    """Which tools the answer may call. Raises `RequestError`."""
    # Not several calls if the template would refuse them in the next request.
    is_parallel = body.parallel_tool_calls is not False and not model.messages.has_single_calls
    return tool_use(body.tools or (), body.tool_choice, is_parallel=is_parallel)


async def chat_prompt(body: ChatBody, model: ServedModel, use: ToolUse, keep: int | None) -> list[int]:
    """The last `keep` tokens of the conversation. Raises `RequestError` for one without any."""
    prompt = await model.encode_chat(
        await messages_for_template(body.messages, model),
        add_generation_prompt=body.add_generation_prompt is not False,
        # The template writes the special tokens itself.
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=with_documents(template_kwargs_of(body), body, model),
        tools=use.for_template,
        continues=bool(body.continue_final_message),
    )
    if not prompt:
        raise RequestError("`messages` have no tokens. Send at least one message with content.", param="messages")
    return prompt if keep is None else prompt[-keep:]


async def messages_for_template(messages: Sequence[ChatMessage], model: ServedModel) -> list[dict[str, Any]]:
    """A conversation as chat templates read it."""
    size = sum(MESSAGE_COST + message.argument_characters for message in messages)
    return await model.threads.run(size, lambda: [message.for_template() for message in messages])


def with_documents(
    template_kwargs: Mapping[str, object], body: ChatBody | TokenizeBody, model: ServedModel
) -> Mapping[str, object]:
    """The variables with the documents. Raises `RequestError` if the template would not show them."""
    if not body.documents:
        return template_kwargs
    if "documents" not in model.template.variables:
        raise RequestError("The chat template shows no documents. Put their text into a message.", param="documents")
    return {**template_kwargs, "documents": body.documents}


def template_kwargs_of(body: ChatBody) -> dict[str, bool | int | float | str]:
    """The variables of the template. The requested effort is one of them, and decides whether the model thinks."""
    given = body.chat_template_kwargs or {}
    if body.reasoning_effort is None:
        return given
    thinks = body.reasoning_effort != "none"
    return {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks, **given}
