"""Budgets for thinking at a real cluster: the same tokens everywhere, and those without one until it is used up."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.answers import CHAT, OPEN_THINKING, Call, differences, send_all
from tests.support.cluster import MODEL, Cluster

#: Long enough that its KV is worth a transfer.
USER = {"role": "user", "content": "Which rivers cross a desert, and which of them are long? " * 8}
BODY: dict[str, Any] = {"messages": [USER], "chat_template": OPEN_THINKING, "max_tokens": 20, "ignore_eos": True}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["long", "short"]}}}
#: `</`, `think` and `>` of this tokenizer.
CLOSING = 3


def _ask(cluster: Cluster, **fields: Any) -> Any:
    with cluster.client() as client:
        more = {name: fields.pop(name) for name in ("max_tokens", "temperature", "response_format") if name in fields}
        given: dict[str, Any] = {"model": MODEL, "messages": [USER], "temperature": 0, "max_tokens": 20} | more
        own = {"chat_template": OPEN_THINKING, "ignore_eos": True, "return_token_ids": True} | fields
        return client.chat.completions.create(**given, extra_body=own)


def test_answers_are_those_of_a_single_worker_alone_and_in_a_crowd(cluster: Cluster, monolith: Cluster) -> None:
    calls = [
        Call(path=CHAT, body={**BODY, "thinking_token_budget": budget, **more}, stream=budget % 2 == 1)
        for budget, more in (
            (0, {"temperature": 0}),
            (1, {"temperature": 0.9, "seed": 4, "n": 2}),
            (5, {"temperature": 1.0, "seed": 5, "response_format": JSON}),
            (8, {"temperature": 0.7, "seed": 6, "logprobs": True, "bad_words": ["</", "think"]}),
        )
    ]
    expected = asyncio.run(send_all(monolith, calls, at_once=1))
    answers = asyncio.run(send_all(cluster, calls, at_once=len(calls)))
    assert not differences(calls, answers, expected)


def test_thinking_is_that_without_a_budget_until_it_is_used_up(cluster: Cluster) -> None:
    free = _ask(cluster).choices[0]
    assert free.message.reasoning
    for budget in (0, 1, 12):
        answer = _ask(cluster, thinking_token_budget=budget)
        [choice] = answer.choices
        assert choice.token_ids[:budget] == free.token_ids[:budget]
        assert len(choice.token_ids) == len(free.token_ids)
        assert answer.usage.completion_tokens_details.reasoning_tokens == budget + CLOSING
        assert getattr(choice.message, "reasoning", "") in free.message.reasoning
        assert choice.message.content
    assert _ask(cluster, thinking_token_budget=20).choices[0].token_ids == free.token_ids


def test_an_answer_of_json_comes_behind_thinking_that_was_ended(cluster: Cluster) -> None:
    answer = _ask(cluster, thinking_token_budget=6, response_format=JSON)
    assert answer.choices[0].message.content in ('"long"', '"short"')
    assert answer.choices[0].finish_reason == "stop"
