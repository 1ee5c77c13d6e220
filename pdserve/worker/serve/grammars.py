"""The grammars of requests, read on a thread of their own and kept for the next request that has them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import thread_time

from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.base.sampling import SamplingParams
from pdserve.model.grammar import Grammar, GrammarVocabulary
from pdserve.model.thinking import BoundedThinking, OutputGrammar, ThinkingVocabulary
from pdserve.model.tokenizer_file import read_tokenizer

log = get_logger(__name__)

#: Maximum number of grammars that are kept: those used last.
_MAX_KEPT = 64


class Grammars:
    """Reads grammars. Used on the event loop."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        """`vocab_size`: that of the model's logits."""
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        # One thread: a grammar that takes long delays other grammars, and no step.
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._vocabulary: GrammarVocabulary | None = None
        self._thinking: ThinkingVocabulary | None = None
        #: Whether grammars can be read, as far as is known.
        self.are_available = True
        self._kept: OrderedDict[str, asyncio.Future[Grammar]] = OrderedDict()

    async def run(self) -> None:
        """Reads the vocabulary, so that no request has to wait for that, and ends the thread when it is cancelled.

        With a tokenizer that cannot be read there are no grammars, and the worker serves all other requests.
        """
        try:
            await self._load_first()
            await asyncio.get_running_loop().create_future()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _load_first(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
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
        grammar = await self._get(params.grammar) if params.grammar else None
        if params.thinking is None:
            return grammar
        vocabulary = await asyncio.get_running_loop().run_in_executor(self._thread, self._load_thinking)
        return BoundedThinking(params.thinking, vocabulary, grammar)

    async def _get(self, grammar: str) -> Grammar:
        reading = self._kept.get(grammar)
        if reading is None:
            reading = asyncio.get_running_loop().run_in_executor(self._thread, self._read, grammar)
            # Retrieves the error, which asyncio would log if no request waited for it any more.
            reading.add_done_callback(lambda read: read.cancelled() or read.exception())
            self._kept[grammar] = reading
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        try:
            return await asyncio.shield(reading)
        except Exception:
            self._kept.pop(grammar, None)
            raise

    def _read(self, grammar: str) -> Grammar:
        return self._load().compile(grammar)

    def _load(self) -> GrammarVocabulary:
        if self._vocabulary is None:
            tokenizer = read_tokenizer(self._model_dir, encodes=False)
            self._vocabulary = GrammarVocabulary(tokenizer, self._vocab_size, thread_time)
            self._thinking = ThinkingVocabulary(tokenizer, self._vocab_size)
        return self._vocabulary

    def _load_thinking(self) -> ThinkingVocabulary:
        self._load()
        assert self._thinking is not None
        return self._thinking
