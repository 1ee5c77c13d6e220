"""However workers fail under a request, it ends within bounds, and only failures in its own steps refuse it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.peers.workers import Tier
from router_svc.request.quarantine import Deaths

tiers: st.SearchStrategy[Tier] = st.sampled_from(["prefill", "decode"])


@given(st.lists(tiers, max_size=12))
def test_a_request_ends_after_three_workers_of_one_tier(story: list[Tier]) -> None:
    deaths, so_far = Deaths(), list[Tier]()
    for tier in story:
        if deaths.is_over:
            break
        was_alone = deaths.is_alone
        deaths = deaths.after(tier)
        so_far.append(tier)
        assert deaths.count == len(so_far)
        assert deaths.is_alone == (len(so_far) >= 2)
        assert deaths.tier == so_far[0]
        assert deaths.is_over == (was_alone or len(set(so_far)) == 2)
        assert deaths.may_reach(so_far[0])
    assert len(so_far) <= 3
