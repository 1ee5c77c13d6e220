"""Regular expressions, choices and grammars in GBNF and Lark's notation accept what they define, and nothing else.

The full depth has 500 of each kind. `python -m tests.support.text_grammars.check` prints the counts.
"""

from __future__ import annotations

import pytest

from tests.support.depth import IS_FULL
from tests.support.text_grammars.check import KINDS, Check

COUNT = 500 if IS_FULL else 12


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_accepted_is_what_matches(kind: str) -> None:
    check = Check(kind)
    check.compare(range(COUNT))
    assert check.wrong == []
    assert check.counts["grammars"] == COUNT
    assert check.counts["grammars given up"] <= COUNT // 100
    assert check.counts["valid texts"] > 4 * COUNT
    assert check.counts["invalid texts"] > 15 * COUNT
    assert check.counts["walks"] > 2 * COUNT
    assert check.counts["walks given up"] <= COUNT // 50
    # Longest matches of terminals exclude little, even where those share characters.
    assert check.counts["valid texts not accepted"] <= check.counts["valid texts"] // 10
