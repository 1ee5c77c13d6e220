"""Decisions over HTTP: prompts, probabilities, bounds, and what follows when a worker fails."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdserve.base.errors import PdserveError, RequestError
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.script import failing, vanish
from tests.support.tiny_model import NAME

PREDICATE = {"type": "predicate", "name": "refund", "instructions": "A refund?"}
CHOICE = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "billing", "description": "money"}, {"value": "it"}, {"value": True}],
}
SCORE = {
    "type": "score",
    "name": "anger",
    "instructions": "How angry?",
    "levels": [{"label": "calm"}, {"label": "cross"}, {"label": "mad", "description": "shouts"}],
}
#: Log-probabilities of the tokens of labels, which are bytes. Predicates are read from the first letters of words.
LISTED = {
    **{ord("y"): math.log(0.2), ord("Y"): math.log(0.1), ord("n"): math.log(0.05), ord("N"): math.log(0.05)},
    **{ord("A"): math.log(0.1), ord("B"): math.log(0.3), ord("C"): math.log(0.1)},
    **{ord("0"): math.log(0.1), ord("1"): math.log(0.2), ord("2"): math.log(0.7)},
}


async def decide(cluster: ScriptedCluster, *questions: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    cluster.calls.script.listed = LISTED
    body = {"model": NAME, "input": "I was charged twice.", "questions": [*questions]}
    return await cluster.post("/v1/decisions", body | fields)


def prompts(cluster: ScriptedCluster) -> list[str]:
    """What workers got, in the order of the questions."""
    prefills = sorted(cluster.calls.prefills, key=lambda each: each.ref.request_id)
    shown = {256: "<", 257: ">"}
    return ["".join(shown.get(token) or chr(token) for token in each.prompt_token_ids) for each in prefills]


async def test_questions_are_answered_in_order_by_the_probabilities_of_their_labels(cluster: ScriptedCluster) -> None:
    status, body = await decide(cluster, PREDICATE, CHOICE, SCORE)
    assert status == 200
    predicate, choice, score = body["answers"]
    assert (predicate["type"], predicate["name"]) == ("predicate", "refund")
    assert predicate["probability"] == pytest.approx(0.75)
    assert [(each["value"], each["probability"]) for each in predicate["probabilities"]] == [
        (True, pytest.approx(0.75)),
        (False, pytest.approx(0.25)),
    ]
    assert predicate["label_mass"] == pytest.approx(0.4)
    assert (choice["type"], choice["name"], choice["choice"]) == ("choice", None, "it")
    assert [each["value"] for each in choice["probabilities"]] == ["billing", "it", True]
    assert [each["probability"] for each in choice["probabilities"]] == pytest.approx([0.2, 0.6, 0.2])
    assert [each["logprob"] for each in choice["probabilities"]] == pytest.approx(
        [math.log(p) for p in (0.1, 0.3, 0.1)]
    )
    assert (choice["confidence"], choice["label_mass"]) == (pytest.approx(0.3), pytest.approx(0.5))
    assert (score["score"], score["confidence"]) == (pytest.approx(0.2 + 2 * 0.7), pytest.approx(0.7))
    assert [(each["value"], each["label"]) for each in score["probabilities"]] == [
        (0, "calm"),
        (1, "cross"),
        (2, "mad"),
    ]
    assert (body["object"], body["model"]) == ("decision", NAME)


async def test_prompts_share_the_input_and_end_with_the_question(cluster: ScriptedCluster) -> None:
    status, body = await decide(cluster, PREDICATE, CHOICE, SCORE)
    assert status == 200
    start, end = "<user:I was charged twice.\n\n", "><assistant:"
    assert prompts(cluster) == [
        f"{start}A refund?\nIs this true? Answer with only yes or no.{end}",
        f"{start}Which team?\nA: billing (money)\nB: it\nC: true\nAnswer with only the letter of the best answer.{end}",
        f"{start}How angry?\n0: calm\n1: cross\n2: mad (shouts)\nAnswer with only the number of the best level.{end}",
    ]
    assert body["usage"] == {
        "input_tokens": sum(map(len, prompts(cluster))),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": sum(map(len, prompts(cluster))) + 3,
    }


async def test_no_decode_worker_is_needed(cluster: ScriptedCluster) -> None:
    status, body = await decide(cluster, PREDICATE, CHOICE)
    assert status == 200
    assert not cluster.calls.decode_starts
    assert not any(request.HasField("ticket") for request in cluster.calls.prefills)
    record = (await cluster.get(f"/v1/requests/{body['id']}/trace"))[1]
    assert (record["state"], record["endpoint"]) == ("finished", "/v1/decisions")
    assert {each["tier"] for each in record["decisions"]} == {"prefill"}


async def test_a_conversation_is_the_input_and_the_question_is_the_users_turn(cluster: ScriptedCluster) -> None:
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_json", "data": {"a": 1}}]}
    assistant = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]}
    question = "A refund?\nIs this true? Answer with only yes or no.><assistant:"
    for given, start in (
        ([user], '<user:Hi\n{"a": 1}\n\n'),
        ([user, assistant], '<user:Hi\n{"a": 1}><assistant:Yes?><user:'),
        ([{"role": "system", "content": "Be fair."}, assistant], "<system:Be fair.><assistant:Yes?><user:"),
    ):
        cluster.calls.forget()
        assert (await decide(cluster, PREDICATE, input=given))[0] == 200
        assert prompts(cluster) == [start + question]


async def test_openais_client_reads_every_kind_of_answer(cluster: ScriptedCluster) -> None:
    cluster.calls.script.listed = LISTED
    async with cluster.client() as client:
        answer = await client.decisions.create(
            model=NAME,
            input="x",
            questions=[PREDICATE, CHOICE, SCORE],  # type: ignore[list-item]
            prompt_cache_key="k",
            prompt_cache_options={"ttl": "30m"},
            safety_identifier="s",
        )
    predicate, choice, score = answer.answers
    assert predicate.type == "predicate"
    assert choice.type == "choice"
    assert score.type == "score"
    assert predicate.probability == pytest.approx(0.75)
    assert (choice.choice, choice.name) == ("it", None)
    assert score.score == pytest.approx(1.6)
    assert answer.usage.output_tokens == 3


async def test_what_cannot_be_decided_is_refused_by_name(cluster: ScriptedCluster) -> None:
    many = [{"value": f"v{index}"} for index in range(129)]
    for fields, status, param in (
        ({"questions": []}, 400, "questions"),
        ({"questions": [PREDICATE] * 401}, 400, "questions"),
        ({"questions": [{"type": "essay", "instructions": "?"}]}, 400, "questions[0]"),
        ({"questions": [PREDICATE, {"type": "predicate"}]}, 400, "questions[1].instructions"),
        ({"questions": [CHOICE | {"choices": [{"value": "a"}]}]}, 400, "questions[0].choices"),
        ({"questions": [CHOICE | {"choices": [{"value": "a"}, {"value": "a"}]}]}, 400, "questions[0]"),
        ({"questions": [CHOICE | {"choices": [{"value": ""}, {"value": "a"}]}]}, 400, "questions[0].choices[0].value"),
        ({"questions": [CHOICE | {"choices": many}]}, 400, "questions[0].choices"),
        ({"questions": [CHOICE | {"choices": many[:53]}]}, 400, "questions[0].choices"),
        (
            {"questions": [SCORE | {"levels": [{"label": str(index)} for index in range(11)]}]},
            400,
            "questions[0].levels",
        ),
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "reasoning"}]}, 400, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            "input[0].content",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]}, 400, "input[0].content"),
        ({"input": "a" * 256}, 400, "input"),
        ({"input": "a" * 100_000, "questions": [PREDICATE] * 100}, 413, "questions"),
        ({"model": "other"}, 404, "model"),
        ({"temperature": 0.5}, 400, "temperature"),
        ({"priority": 1}, 400, "priority"),
        ({"timeout": 0}, 400, "timeout"),
    ):
        found, body = await decide(cluster, *fields.pop("questions", [PREDICATE]), **fields)  # type: ignore[attr-defined]
        assert (found, body["error"]["param"]) == (status, param), (fields, body)
    assert not cluster.calls.prefills


async def test_choices_have_as_many_labels_as_the_tokenizer_has_letters(cluster: ScriptedCluster) -> None:
    values = [{"value": f"v{index}"} for index in range(20)]
    status, body = await decide(cluster, CHOICE | {"instructions": "?", "choices": values}, input="x")
    assert status == 200
    assert [each["value"] for each in body["answers"][0]["probabilities"]] == [each["value"] for each in values]
    assert sum(each["probability"] for each in body["answers"][0]["probabilities"]) == pytest.approx(1)


async def test_a_prompt_that_ends_within_thinking_is_refused(thinker: ScriptedCluster) -> None:
    assert (await decide(thinker, PREDICATE))[0] == 200
    assert prompts(thinker)[0].endswith("<think>\n\n</think>\n\n")
    kwargs = {"enable_thinking": True, "opens": True}
    status, body = await decide(thinker, PREDICATE, chat_template_kwargs=kwargs)
    assert (status, body["error"]["param"]) == (400, "chat_template_kwargs")


async def test_a_worker_that_fails_is_replaced_and_its_refusals_are_answered(cluster: ScriptedCluster) -> None:
    cluster.calls.script.fail("prefill", vanish)
    status, body = await decide(cluster, PREDICATE)
    assert (status, body["answers"][0]["probability"]) == (200, pytest.approx(0.75))
    cluster.calls.script.fail("prefill", failing(RequestError("no")))
    assert (await decide(cluster, PREDICATE))[0] == 400
    cluster.calls.script.fail("prefill", *[failing(PdserveError("broken"))] * 9)
    cluster.calls.script.fail("decode", *[failing(PdserveError("broken"))] * 9)
    assert (await decide(cluster, PREDICATE))[0] >= 500


async def test_log_probabilities_that_a_worker_leaves_out_are_an_error(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cluster.calls.script._logprobs
    monkeypatch.setattr(cluster.calls.script, "_logprobs", lambda token, listed: kept(token, listed[1:]), raising=False)
    status, body = await decide(cluster, PREDICATE)
    assert status == 502
    assert "log-probabilities" in body["error"]["message"]
