"""How thorough tests of crossed parameters are: `PDSERVE_TEST_DEPTH=full` runs every combination with all examples.

Without it, combinations that share most of their code with one that is tested in full get fewer examples. The module of
such a test says what only the full depth checks.
"""

from __future__ import annotations

import os

from tests.support.backends import INSTRUCTION_SETS

#: Examples of a combination that is not tested in full, and of the portable instruction set.
MIN_EXAMPLES, PORTABLE_EXAMPLES = 5, 10

_depth = os.environ.get("PDSERVE_TEST_DEPTH", "")
assert _depth in ("", "full"), f"PDSERVE_TEST_DEPTH is {_depth!r}, but must be 'full' or unset"
IS_FULL = _depth == "full"


def examples_on(instruction_set: str, num_examples: int) -> int:
    """Hypothesis examples: at full depth all, else three fifths on the best instruction set, and few on others."""
    if IS_FULL:
        return num_examples
    if instruction_set == INSTRUCTION_SETS[0]:
        return num_examples * 3 // 5
    return min(num_examples, PORTABLE_EXAMPLES if instruction_set == "portable" else MIN_EXAMPLES)
