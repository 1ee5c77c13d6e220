"""Whether a grammar is valid and cheap enough, found without a vocabulary. Without torch and numpy, as routers are."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.model.library_errors import library_errors

#: What the parser may spend: on a grammar, about 20 ms; on the tokens after a prefix, some milliseconds.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    # What a client sends stays out of logs.
    verbose_errors=False,
)


#: Why a grammar is refused that makes the library panic, as some classes of characters beyond ASCII do in version 1.9.
GAVE_UP = "the library for grammars gave up on it"
#: Characters of what the library says that a client gets.
_MAX_PROBLEM = 500
#: What the library says of a grammar that is larger than a limit.
_TOO_LARGE = ("too big", "too many", "too large")


class GrammarLibraryFailed(Exception):
    """The library has raised an error of its own, or has panicked."""


def is_too_large(problem: str) -> bool:
    """Whether a grammar has this problem because of its size as a whole."""
    return any(words in problem for words in _TOO_LARGE)


def grammar_problem(grammar: str) -> str:
    """Why a grammar is not valid, or takes too long to read, in llguidance's words; empty: it is valid."""
    try:
        with library_errors(GrammarLibraryFailed):
            is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    except GrammarLibraryFailed as error:
        return shortened(f"{GAVE_UP}: {error}")
    return shortened("; ".join(messages)) if is_error else ""


def has_no_text(grammar: str) -> bool:
    """Whether nothing matches a valid grammar, as far as its first character shows."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()
    return bool(matcher.is_error())


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def shortened(problem: str) -> str:
    """The library's words, without the grammar that they quote, and the backtrace of a library that has given up."""
    text = problem.partition("<backtrace>")[0].partition("\n   1 |")[0].strip()
    return text if len(text) <= _MAX_PROBLEM else f"{text[:_MAX_PROBLEM]}..."
