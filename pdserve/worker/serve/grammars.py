"""The grammars of requests, read on a thread of their own and kept for the next request that has them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.base.sampling import SamplingParams
from pdserve.model.grammar import Grammar, GrammarVocabulary
from pdserve.model.thinking import BoundedThinking, OutputGrammar
from pdserve.model.vocabularies import read_vocabularies

log = get_logger(__name__)

T = TypeVar("T")

#: Maximum number of grammars that are kept: those used last.
_MAX_KEPT = 64
#: Maximum number of characters of all of them. A grammar takes about 40 bytes of memory for each.
_MAX_KEPT_CHARACTERS = 1_000_000


class Grammars:
    """Reads grammars. Used on the event loop."""

    def __init__(self, model_dir: Path) -> None:
        """Begins to read the model's vocabulary. `close` has to follow."""
        # One thread: a grammar that takes long delays other grammars, and no step.
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._vocabularies = self._on_thread(partial(read_vocabularies, model_dir))
        #: Whether grammars can be read, as far as is known.
        self.are_available = True
        self._kept: OrderedDict[str, asyncio.Future[Grammar]] = OrderedDict()

    def close(self) -> None:
        """Ends the thread, once it has read what it reads now."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read_vocabulary(self) -> None:
        """Returns when the vocabulary has been read, so that no request has to wait for that.

        With a tokenizer that cannot be read there are no grammars, and the worker serves all other requests.
        """
        try:
            await asyncio.shield(self._vocabularies)
        except SetupError as error:
            self.are_available = False
            log.warning("no_grammars", reason=error)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the tokenizer, other requests need none
            self.are_available = False
            log.error("no_grammars", exc=error)

    async def get(self, params: SamplingParams) -> OutputGrammar | None:
        """The grammar and the bound on thinking of a request; None: it has neither.

        Raises `RequestError` when the grammar is not valid.
        """
        if not params.grammar and params.thinking is None:
            return None
        vocabularies = await asyncio.shield(self._vocabularies)
        grammar = await self._read(params.grammar, vocabularies.grammars) if params.grammar else None
        if params.thinking is None:
            return grammar
        return BoundedThinking(params.thinking, vocabularies.thinking, grammar)

    async def _read(self, grammar: str, vocabulary: GrammarVocabulary) -> Grammar:
        reading = self._kept.get(grammar)
        if reading is None:
            reading = self._kept[grammar] = self._on_thread(partial(vocabulary.compile, grammar))
            while len(self._kept) > _MAX_KEPT or sum(map(len, self._kept)) > _MAX_KEPT_CHARACTERS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        try:
            return await asyncio.shield(reading)
        except Exception:
            self._kept.pop(grammar, None)
            raise

    def _on_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        future = asyncio.get_running_loop().run_in_executor(self._thread, call)
        # Retrieves the error, which asyncio would log if no request waited for it any more.
        future.add_done_callback(lambda read: read.cancelled() or read.exception())
        return future
