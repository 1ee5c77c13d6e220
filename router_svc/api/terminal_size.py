"""How large the terminals of a Lark grammar are once each name in them is what it stands for. Pure.

The library replaces them before it looks at its limits. Where each of 300 terminals has the next one twice, that takes
it seconds.
"""

from __future__ import annotations

import re

#: Characters and expressions of one terminal.
MAX_TERMINAL = 1_000_000
_MAX_SWEEPS = 32
# Repetitions are possessive: what is not closed must not be looked for again from each of its characters.
_DEFINITION = re.compile(r"^[ \t]*+[?!]*+(\w++)(?:\.-?\d++)?[ \t]*+(?:\[[^\]\n]*+\][ \t]*+)?:", re.MULTILINE)
#: A comment, a string, an expression, or the name of a terminal.
_ITEM = re.compile(r"""(?://|\#)[^\n]*+|"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\\n])*+/?|(?P<name>\b_*+[A-Z]\w*+)""")


def has_large_terminal(grammar: str) -> bool:
    """Whether a terminal of the grammar is larger than `MAX_TERMINAL`, or is part of itself."""
    starts = list(_DEFINITION.finditer(grammar))
    ends = [match.start() for match in starts[1:]] + [len(grammar)] * bool(starts)
    bodies = [
        (match[1], [*_ITEM.finditer(grammar, match.end(), end)])
        for match, end in zip(starts, ends, strict=True)
        if match[1].strip("_")[:1].isupper()
    ]
    own = [(name, sum(len(each[0]) for each in found if each["name"] is None)) for name, found in bodies]
    names = [[each["name"] for each in found if each["name"] is not None] for _, found in bodies]
    sizes = dict(own)
    terminals = list(zip(own, names, strict=True))
    # Most grammars define what a terminal consists of behind it, some before it.
    for _ in range(_MAX_SWEEPS):
        terminals.reverse()
        before = sizes.copy()
        for (name, size), used in terminals:
            sizes[name] = size + sum(sizes.get(each, 1) for each in used)
            if sizes[name] > MAX_TERMINAL:
                return True
        if sizes == before:
            return False
    return True
