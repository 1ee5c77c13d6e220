"""However workers die under a request, it ends within bounds, and only deaths that it causes end it early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.workers import Tier
from router_svc.request.quarantine import Death, Deaths

tiers: st.SearchStrategy[Tier] = st.sampled_from(["prefill", "decode"])
stories = st.lists(st.tuples(st.sampled_from(Death), tiers), max_size=12)


@given(stories)
def test_a_request_ends_within_the_bounds_of_both_kinds(story: list[tuple[Death, Tier]]) -> None:
    deaths, so_far = Deaths(), list[tuple[Death, Tier]]()
    for death, tier in story:
        if deaths.is_over:
            break
        was_alone = deaths.is_alone
        deaths = deaths.after(death, tier)
        so_far.append((death, tier))
        own = [tier for death, tier in so_far if death is Death.OWN]
        num_met = len(so_far) - len(own)
        assert (deaths.own, deaths.met) == (len(own), num_met)
        assert deaths.is_alone == (len(own) >= 2 or num_met >= 3)
        assert was_alone <= deaths.is_alone
        assert deaths.tier == (own[0] if own else None)
        if was_alone and death is Death.OWN:
            assert deaths.is_over
    own = [tier for death, tier in so_far if death is Death.OWN]
    assert len(own) <= 3
    assert len(so_far) <= 1 + 3 + 3
    # All workers that failed by themselves, but for the one that ended the request, are of one tier.
    assert len(set(own[:-1])) <= 1
    if len(so_far) - len(own) <= 2 and len(own) <= 2 and len(set(own)) <= 1:
        assert not deaths.is_over


@given(st.lists(tiers, min_size=5, max_size=5))
def test_five_workers_lost_from_outside_do_not_end_a_request(lost: list[Tier]) -> None:
    deaths = Deaths()
    for tier in lost:
        deaths = deaths.after(Death.MET, tier)
    assert not deaths.is_over
    assert deaths.may_reach("prefill")
    assert deaths.may_reach("decode")
    assert deaths.after(Death.MET, "decode").is_over
