"""The texts of prompts that completions repeat."""

from __future__ import annotations

from pdserve.base.errors import TooLarge
from router_svc.api.openai.schema import CompletionBody
from router_svc.api.served_model import ServedModel

#: Characters of prompts that the choices of one response repeat.
MAX_ECHO_CHARACTERS = 8 * 1024**2


async def echoes_of(body: CompletionBody, model: ServedModel, truncated: list[list[int]]) -> list[str]:
    """The texts of the prompts. Raises `TooLarge` if all choices together repeat too much of them."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if truncated or not texts:
        texts = await model.decode(truncated or [prompt for prompt in body.prompt if isinstance(prompt, list)])
    repeated = sum(map(len, texts)) * (body.n or 1)
    if repeated > MAX_ECHO_CHARACTERS:
        raise TooLarge(
            f"`echo` with n = {body.n or 1} repeats {repeated} characters of prompts (limit {MAX_ECHO_CHARACTERS}). "
            "Lower n, or leave echo out.",
            param="echo",
        )
    return texts
