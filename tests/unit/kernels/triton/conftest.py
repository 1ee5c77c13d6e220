"""Without Triton, the tests of this folder cannot be imported."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
