"""Where the decision record of a request is looked for."""

from __future__ import annotations

import re

from router_svc.records.traces import ID_PREFIXES
from tests.arch.documents import ROOT


def test_a_request_of_any_endpoint_is_found_by_the_id_that_its_client_chose() -> None:
    """Fails for an endpoint whose ids start with a prefix of its own, as those of decisions once did."""
    made = re.compile(r'(?:Ids\.make\(|id_prefix=)"([^"]+)"')
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "router_svc").rglob("*.py")]
    prefixes = {prefix for source in sources for prefix in made.findall(source)}
    assert {"chatcmpl-", "gen-", "dec-"} <= prefixes
    assert prefixes <= set(ID_PREFIXES)
