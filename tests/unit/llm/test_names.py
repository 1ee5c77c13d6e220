"""`import pdserve` is cheap, and has the names of the Python API all the same."""

from __future__ import annotations

import subprocess
import sys

import pdserve
from pdserve.llm.client import derived_seed

PROGRAM = """
import sys
import pdserve
assert not [name for name in sys.modules if name.startswith("pdserve.")], sys.modules
for name in pdserve.__all__:
    getattr(pdserve, name)
assert not {"torch", "transformers", "triton", "numpy"} & set(sys.modules)
"""


def test_nothing_is_imported_before_it_is_used_and_never_torch() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_unknown_names_are_none() -> None:
    assert not hasattr(pdserve, "LLMs")


def test_seeds_follow_from_that_of_the_llm_and_the_number_of_the_request() -> None:
    seeds = {derived_seed(seed, number) for seed in range(20) for number in range(20)}
    assert len(seeds) == 400
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    # Outputs of earlier runs are repeated as long as these do not change.
    assert derived_seed(0, 0) == 3560153452049741418
    assert derived_seed(None, 3) is None
