"""The API key as its two sides know it: the variable that holds it, and the header that carries it."""

from __future__ import annotations

from pdserve.base.config import variable

#: Keys of a router, divided by spaces or commas; for commands that call a router, the first is theirs.
KEY_VARIABLE = "PDSERVE_API_KEY"


def bearer(api_key: str | None) -> dict[str, str]:
    """The header for requests with this key, else with the environment's first; empty without either."""
    key = api_key or next(iter((variable(KEY_VARIABLE) or "").replace(",", " ").split()), "")
    return {"Authorization": f"Bearer {key}"} if key else {}
