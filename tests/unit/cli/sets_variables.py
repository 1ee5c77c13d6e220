"""A module that sets variables when it is imported, as ucxx does."""

from __future__ import annotations

import os

os.environ.setdefault("SET_BY_IMPORT", "by an import")
os.environ.setdefault("OF_BOTH", "by an import")
