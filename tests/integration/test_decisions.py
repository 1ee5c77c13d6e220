"""Decisions at a real cluster: the numbers of completions, alone, together and behind a cached prefix."""

from __future__ import annotations

from typing import Any

from tests.support.cluster import MODEL, Cluster

TEXT = "The sea is cold in winter, and the ships stay in the harbour until the ice is gone. " * 8
QUESTIONS: list[Any] = [
    {"type": "predicate", "instructions": "The text is about weather."},
    {"type": "choice", "instructions": "What is cold?", "choices": [{"value": "the sea"}, {"value": "the fire"}]},
    {"type": "score", "instructions": "How cold?", "levels": [{"label": "warm"}, {"label": "cool"}, {"label": "icy"}]},
]


def test_decisions_are_the_same_together_alone_and_behind_a_cached_prefix(cluster: Cluster) -> None:
    with cluster.client() as client:
        together = client.decisions.create(model=MODEL, input=TEXT, questions=QUESTIONS)
        again = client.decisions.create(model=MODEL, input=TEXT, questions=QUESTIONS)
        alone = [client.decisions.create(model=MODEL, input=TEXT, questions=[each]).answers[0] for each in QUESTIONS]
    assert together.answers == again.answers == alone
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert together.usage.output_tokens == len(QUESTIONS)


def test_log_probabilities_are_those_of_the_chat_that_the_question_is(cluster: Cluster) -> None:
    content = f"{TEXT}\n\nWhat is cold?\nA: the sea\nB: the fire\nAnswer with only the letter of the best answer."
    with cluster.client() as client:
        answer: Any = client.decisions.create(model=MODEL, input=TEXT, questions=QUESTIONS[1:2]).answers[0]
        extra = {"return_token_ids": True}
        prompts: list[Any] = [
            client.completions.create(model=MODEL, prompt=label, max_tokens=1, extra_body=extra) for label in "AB"
        ]
        ids = [each.choices[0].prompt_token_ids[-1] for each in prompts]
        chat = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=1,
            logprobs=True,
            extra_body={"logprob_token_ids": ids},
        )
    entries = chat.choices[0].logprobs
    assert entries is not None
    assert entries.content is not None
    found = {each.token: each.logprob for each in entries.content[0].top_logprobs}
    assert {label: each.logprob for label, each in zip("AB", answer.probabilities, strict=True)} == found
