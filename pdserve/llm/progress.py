"""The bar "Processed prompts", and the line that shows what a starting cluster does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.llm.outputs import EmbeddingRequestOutput, RequestOutput

_DESCRIPTION = "Processed prompts"
#: Makes a bar with the interface of tqdm's.
MakeBar = Callable[..., Any]
Shown = RequestOutput | EmbeddingRequestOutput


class Speed:
    """Tokens per second since the start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self._input = self._output = 0

    def add(self, output: Shown) -> str:
        """Counts a result. Returns the speeds so far as text."""
        self._input += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._output += sum(len(each.token_ids) for each in output.outputs)
        seconds = max(self._clock() - self._started_at, 1e-9)
        return f"input: {self._input / seconds:.1f} toks/s, output: {self._output / seconds:.1f} toks/s"


@contextmanager
def progress_bar(count: int, use_tqdm: bool | MakeBar) -> Iterator[Callable[[Shown], None]]:
    """A function to call with each result. `use_tqdm`: whether there is a bar, or what makes one, as tqdm does."""
    if use_tqdm is True:
        with _rich_bar(count) as advance:
            yield advance
    elif use_tqdm is False:
        yield lambda _: None
    else:
        with _given_bar(count, use_tqdm) as advance:
            yield advance


@contextmanager
def _rich_bar(count: int) -> Iterator[Callable[[Shown], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as progress:
        task, speed = progress.add_task(_DESCRIPTION, total=count, speed=""), Speed()
        yield lambda output: progress.update(task, advance=1, speed=speed.add(output))


@contextmanager
def _given_bar(count: int, make_bar: MakeBar) -> Iterator[Callable[[Shown], None]]:
    bar, speed = make_bar(total=count, desc=_DESCRIPTION, dynamic_ncols=True), Speed()

    def advance(output: Shown) -> None:
        bar.postfix = speed.add(output)
        bar.update(1)

    try:
        yield advance
    finally:
        bar.close()


@contextmanager
def start_display(model: str | None) -> Iterator[Callable[[str], None]]:
    """A function to call with what a starting cluster does; on a terminal it is shown in one line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(f"Starting a cluster for {model}") as status:
        yield lambda text: status.update(f"Starting a cluster for {model}   [dim]{text}[/dim]")
