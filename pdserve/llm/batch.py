"""Many requests with bounded concurrency, and their results in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pdserve.llm.client import Client, Request
from pdserve.llm.errors import of_prompt
from pdserve.llm.outputs import RequestOutput

Sent = TypeVar("Sent")
Result = TypeVar("Result")


class _Failed(Exception):
    """A request failed: ends the group of the others."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__()
        self.index = index
        self.error = error


async def run_all(
    client: Client, requests: Sequence[Request], limit: int, on_result: Callable[[RequestOutput], None]
) -> list[RequestOutput]:
    """The outputs of all requests, as `run_each` sends them."""
    return await run_each(client.final, requests, limit, on_result)


async def run_each(
    send: Callable[[Sent], Awaitable[Result]],
    requests: Sequence[Sent],
    limit: int,
    on_result: Callable[[Result], None],
    *,
    numbered: tuple[Sequence[int], int] | None = None,
) -> list[Result]:
    """The results of all requests, in their order, with at most `limit` of them at a time.

    The first failure is raised, with the request's index; the others are cancelled before that. `numbered` has other
    indices for errors, one per request, and what they count.
    """
    results: dict[int, Result] = {}
    remaining = iter(enumerate(requests))

    async def work() -> None:
        for index, request in remaining:
            try:
                results[index] = await send(request)
                on_result(results[index])
            except Exception as error:
                raise _Failed(index, error) from error

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(requests))):
                group.create_task(work())
    except* _Failed as failures:
        first = next(error for error in failures.exceptions if isinstance(error, _Failed))
        indices, count = numbered or (range(len(requests)), len(requests))
        error = of_prompt(first.error, indices[first.index], count)
    else:
        return [results[index] for index in range(len(requests))]
    raise error from (None if error is first.error else first.error)
