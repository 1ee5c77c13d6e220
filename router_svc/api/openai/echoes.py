"""The texts of prompts that completions repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdserve.base.errors import TooLarge
from router_svc.api.openai.schema import CompletionBody
from router_svc.api.served_model import ServedModel
from router_svc.generation import Generation

#: Characters of prompts that the choices of one response repeat.
MAX_ECHO_CHARACTERS = 8 * 1024**2


async def echoes_of(
    body: CompletionBody, model: ServedModel, generations: Sequence[Generation], *, is_truncated: bool
) -> tuple[tuple[str, ...], tuple[Generation, ...]]:
    """The texts of the prompts, and the generations, whose outputs complete the last character of token ids.

    Without `echo` there are no texts, and the generations are as they were. Raises `TooLarge` if all choices together
    repeat too much of them.
    """
    if not body.echo:
        return (), tuple(generations)
    texts = [] if is_truncated else [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if not texts:
        decoded = await model.decode_open([generation.prompt for generation in generations])
        texts = [text for text, _ in decoded]
        generations = [
            replace(generation, text=replace(generation.text, unfinished=unfinished))
            for generation, (_, unfinished) in zip(generations, decoded, strict=True)
        ]
    repeated = sum(map(len, texts)) * (body.n or 1)
    if repeated > MAX_ECHO_CHARACTERS:
        raise TooLarge(
            f"`echo` with n = {body.n or 1} repeats {repeated} characters of prompts (limit {MAX_ECHO_CHARACTERS}). "
            "Lower n, or leave echo out.",
            param="echo",
        )
    return tuple(texts), tuple(generations)
