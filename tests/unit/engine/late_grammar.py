"""A grammar that allows everything, and whose masks are found when a test says so."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from threading import Event
from typing import cast

from pdserve.model.grammar import TokenBits
from pdserve.model.thinking import OutputGrammar


class LateGrammar:
    """Both the grammar and the state of its only output."""

    knows_end = False

    def __init__(self) -> None:
        #: Cleared: what may follow is not found.
        self.finds = Event()
        #: Set while a thread looks for it.
        self.is_looking = Event()
        self._num_found = -1

    def start(self) -> LateGrammar:
        """As `Grammar.start`."""
        return self

    def can_run_ahead(self, tokens: array[int], num_prompt: int) -> bool:
        """As `GrammarState.can_run_ahead`."""
        return False

    def find(self, tokens: array[int], num_prompt: int) -> None:
        """As `GrammarState.find`; takes until `finds` is set."""
        if self.is_looking.is_set():
            return
        self.is_looking.set()
        num = len(tokens)
        self.finds.wait()
        self._num_found = num
        self.is_looking.clear()

    def is_found(self, tokens: array[int], num_prompt: int) -> bool:
        """As `GrammarState.is_found`."""
        return self._num_found == len(tokens)

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits | None:
        """As `ThinkingState.allowed`. Fails where it would have to wait."""
        assert self.is_found(tokens, num_prompt), "sampled before it is found what may follow"
        return listed

    def as_grammar(self) -> OutputGrammar:
        """For fields that take a grammar."""
        return cast(OutputGrammar, self)
