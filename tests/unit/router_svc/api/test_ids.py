"""Ids that clients choose never make two prompts share a record, and every id can be traced."""

from __future__ import annotations

from router_svc.api.ids import Ids, is_traceable_id


def test_no_two_prompts_of_chosen_ids_have_one_id() -> None:
    several, other = Ids.make("cmpl-", "job"), Ids.make("cmpl-", "job-1")
    ids = [several.of_prompt(0), several.of_prompt(1), other.of_prompt(0), Ids.make("cmpl-", "job.1").of_prompt(0)]
    assert len(set(ids)) == len(ids)


def test_the_longest_ids_can_be_traced() -> None:
    longest = Ids.make("chatcmpl-", "x" * 128)
    assert longest.header == "x" * 128
    assert all(is_traceable_id(text) for text in (longest.response, longest.of_prompt(511), longest.header))
    assert not any(map(is_traceable_id, ("", "a b", "a:b", ":1", "a:1:1", "a/b", "x" * 200)))
