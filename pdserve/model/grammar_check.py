"""Whether a grammar is valid and cheap enough, found without a vocabulary. Without torch and numpy, as routers are."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

#: What the parser may spend: on a grammar, about 20 ms; on the tokens after a prefix, some milliseconds.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    # What a client sends stays out of logs.
    verbose_errors=False,
)


def grammar_problem(grammar: str) -> str:
    """Why a grammar is not valid, or takes too long to read, in llguidance's words; empty: it is valid."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    return "; ".join(messages) if is_error else ""
