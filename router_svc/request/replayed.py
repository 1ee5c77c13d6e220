"""A response that another router has completed: it is read, and no worker computes anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from pdserve.model.tokenizer import Tokenizer
from router_svc.records.stream_log import StreamLog
from router_svc.request.output import Output
from router_svc.request.stream import WRITE_TIMEOUT_S, TokenUsage, Write


class ReplayedStream:
    """The output of a stream that is complete in Redis, as a `DeltaStream` would pass it on."""

    def __init__(self, log: StreamLog, tokenizer: Tokenizer) -> None:
        self._generations = log.resumable.generations
        self._log = log
        self._outputs = [Output(generation, tokenizer) for generation in self._generations]
        self._cached = [0] * len(self._generations)

    async def write_to(self, write: Write, keep_alive: Callable[[], Awaitable[None]] | None = None) -> None:
        """Passes all deltas to `write`. Raises `ConnectionResetError` for a client that reads nothing."""
        async for step in self._log.steps():
            first_choice = self._generations[step.prompt_index].first_choice
            deltas = self._outputs[step.prompt_index].push(step.choices)
            self._cached[step.prompt_index] = step.cached_tokens
            if deltas:
                deltas = [replace(delta, choice_index=first_choice + delta.choice_index) for delta in deltas]
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await write(deltas)
                except TimeoutError:
                    raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None

    def first_write(self) -> None:
        """Nothing is measured."""

    @property
    def is_admitted(self) -> bool:
        """It ran already."""
        return True

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far."""
        return TokenUsage(
            prompt_tokens=sum(len(generation.prompt) for generation in self._generations),
            completion_tokens=sum(output.completion_tokens for output in self._outputs),
            cached_tokens=sum(self._cached),
        )
