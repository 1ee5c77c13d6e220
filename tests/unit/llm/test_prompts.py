"""Prompts in all their forms, and one SamplingParams or one per prompt."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve import SamplingParams
from pdserve.llm.prompts import ChatOptions, Prompt, to_conversations, to_each, to_prompts

USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", [Prompt(text="a")]),
        (["a", "b"], [Prompt(text="a"), Prompt(text="b")]),
        ([1, 2], [Prompt(token_ids=[1, 2])]),
        ([[1], "b"], [Prompt(token_ids=[1]), Prompt(text="b")]),
        ({"prompt": "a", "cache_salt": "s"}, [Prompt(text="a", cache_salt="s")]),
        ([{"prompt_token_ids": [3]}], [Prompt(token_ids=[3])]),
        ([], []),
    ],
)
def test_forms_of_prompts(given: Any, prompts: list[Prompt]) -> None:
    assert to_prompts(given) == prompts


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a", 3], "Prompt 1: A prompt is a text.*but not int"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], "Prompt 0: .*either"),
        ({"cache_salt": "s"}, "either"),
        ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data'"),
        ([[True]], "Prompt 0"),
    ],
)
def test_wrong_prompts_are_refused_with_their_index(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        to_prompts(given)


def test_one_set_of_parameters_serves_all_and_a_list_has_one_per_prompt() -> None:
    one, two = SamplingParams(), SamplingParams(n=2)
    assert to_each(one, SamplingParams, 3) == [one, one, one]
    assert to_each([one, two], SamplingParams, 2) == [one, two]
    with pytest.raises(ValueError, match="3 prompts and 2 SamplingParams"):
        to_each([one, two], SamplingParams, 3)


def test_one_conversation_or_several() -> None:
    assert [each.messages for each in to_conversations([USER], {})] == [[USER]]
    assert [each.messages for each in to_conversations([[USER], [USER, USER]], {})] == [[USER], [USER, USER]]
    with pytest.raises(TypeError, match=r"no argument 'mm_kwargs'\. Its options: add_generation_prompt, .*tools"):
        to_conversations([USER], {"mm_kwargs": {}})  # type: ignore[typeddict-unknown-key]


def test_fields_of_both_endpoints() -> None:
    params = SamplingParams(logprobs=0)
    assert Prompt(token_ids=(1, 2), cache_salt="s").fields(params) == {
        "prompt": [1, 2],
        "cache_salt": "s",
        "logprobs": 0,
    }
    options: ChatOptions = {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "documents": [{"text": "x"}],
        "reasoning_effort": "low",
        "include_reasoning": False,
        "chat_template": "{{ x }}",
    }
    [chat] = to_conversations([USER], options)
    budget = SamplingParams(thinking_token_budget=0)
    assert chat.fields(budget) == {"messages": [USER], "thinking_token_budget": 0, **options}
    with pytest.raises(ValueError, match="`thinking_token_budget` bounds the thinking of messages"):
        Prompt(text="x").fields(budget)
    [chat] = to_conversations([USER], {"continue_final_message": True, "add_generation_prompt": False, "tools": None})
    assert chat.fields(params) == {
        "messages": [USER],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "logprobs": True,
        "top_logprobs": 0,
    }
