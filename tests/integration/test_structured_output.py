"""Structured output of a real cluster, with the official client: valid, equal everywhere, or refused with a path."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from pdserve.cli.router_client import get_model
from pdserve.cli.trace_view import RequestTrace
from tests.support.cluster import MODEL, Cluster
from tests.support.depth import IS_FULL
from tests.support.lazily import openai

#: Long enough that its KV is worth a transfer.
PROMPT = "A short record about a river in Asia, its length and its cities, written as JSON. " * 20
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "km": {"type": "integer", "minimum": 1, "maximum": 9999},
        "cities": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
        "kind": {"enum": ["long", "short"]},
    },
    "required": ["name", "km", "cities", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA, "strict": True}}


def _ask(cluster: Cluster, **options: Any) -> Any:
    own = {
        name: options.pop(name)
        for name in list(options)
        if name in ("max_tokens", "n", "seed", "stream", "temperature")
    }
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 120, "temperature": 0} | own
    return cluster.client().completions.create(**fields, extra_body=options)


def _digest(cluster: Cluster, answer: Any) -> str:
    return get_model(cluster.base_url, f"/v1/requests/{answer.id}/trace", RequestTrace).grammar_sha256 or ""


def _texts(answer: Any) -> list[str]:
    assert all(choice.finish_reason == "stop" for choice in answer.choices), answer
    return [choice.text for choice in answer.choices]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4, "n": 3}])
def test_json_that_was_handed_over_is_valid_and_that_of_a_single_worker(
    cluster: Cluster, monolith: Cluster, options: dict[str, Any]
) -> None:
    texts = _texts(_ask(cluster, response_format=FORMAT, **options))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert _texts(_ask(monolith, response_format=FORMAT, **options)) == texts


def test_a_stream_has_the_same_text(cluster: Cluster) -> None:
    chunks = list(_ask(cluster, response_format=FORMAT, stream=True))
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert [streamed] == _texts(_ask(cluster, response_format=FORMAT))


def test_output_that_max_tokens_cuts_is_the_head_of_the_whole_one_and_is_not_repaired(cluster: Cluster) -> None:
    options = {"response_format": FORMAT, "temperature": 1.0, "seed": 4, "return_token_ids": True}
    [whole] = _ask(cluster, **options).choices
    for max_tokens in (1, 12):
        [cut] = _ask(cluster, **options, max_tokens=max_tokens).choices
        assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:max_tokens])
        assert cut.text == whole.text[: len(cut.text)]
        with pytest.raises(json.JSONDecodeError):
            json.loads(cut.text)


def test_log_probabilities_are_those_before_the_mask(cluster: Cluster) -> None:
    options: dict[str, Any] = {"logprobs": 3, "return_token_ids": True}
    [held] = _ask(cluster, guided_choice=["zq"], **options).choices
    token = held.token_ids[0]
    [free] = _ask(cluster, max_tokens=1, logprob_token_ids=[token], **options).choices
    logprob, alternatives = held.logprobs.token_logprobs[0], held.logprobs.top_logprobs[0]
    # The listed token of the free output is the one that the grammar has forced.
    assert logprob == free.logprobs.top_logprobs[0][held.logprobs.tokens[0]]
    assert alternatives.items() <= free.logprobs.top_logprobs[0].items()
    assert free.token_ids[0] != token
    assert logprob < alternatives[free.logprobs.tokens[0]]


def test_a_chat_is_parsed_by_the_client(cluster: Cluster) -> None:
    answer = cluster.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a river."}],
        response_format=FORMAT,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=120,
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-[a-f]{4}"}}, r"\d{3}-[a-f]{4}"),
        ({"guided_choice": ["the Nile", "the Amazon"]}, "the Nile|the Amazon"),
        ({"guided_grammar": 'root ::= "yes" | "no" "!"*'}, "yes|no!*"),
        # The end of text is the only token left: it ends the output, whatever else says that it may not.
        ({"guided_regex": "a{4}", "min_tokens": 30}, "aaaa"),
        ({"guided_regex": "a{4}", "ignore_eos": True}, "aaaa"),
        # Edits of logits change the choice among what is allowed, and nothing else.
        ({"guided_regex": "[xyz]{5}", "repetition_penalty": 2.0, "logit_bias": {"100": 100.0}}, "[xyz]{5}"),
    ],
)
def test_each_form_bounds_the_whole_output(cluster: Cluster, given: dict[str, Any], pattern: str) -> None:
    [text] = _texts(_ask(cluster, **given))
    assert re.fullmatch(pattern, text), text


@pytest.mark.skipif(not IS_FULL, reason="one of many cases: `make test-all ARGS=full-depth` runs it")
def test_text_is_free_around_a_structural_tag(cluster: Cluster, monolith: Cluster) -> None:
    tag = {
        "type": "tag",
        "begin": "<river>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</river>",
    }
    content = {"type": "triggered_tags", "triggers": ["<river"], "tags": [tag], "at_least_one": True}
    options = {"response_format": {"type": "structural_tag", "format": content}, "max_tokens": 200}
    answer = _ask(cluster, **options)
    found = re.match(r"<river>(.*?)</river>(.*)", answer.choices[0].text, re.DOTALL)
    assert found is not None, answer
    jsonschema.validate(json.loads(found[1]), SCHEMA)
    # The model knows no tags: free text goes on behind this one, to the limit or its own end.
    assert answer.usage.completion_tokens > 30
    assert [each.text for each in _ask(monolith, **options).choices] == [answer.choices[0].text]


def test_a_schema_that_cannot_be_enforced_is_refused_with_its_path(cluster: Cluster) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        _ask(cluster, response_format=named)
    assert refused.value.param == "response_format.json_schema.schema.properties.a.uniqueItems"
    assert "uniqueItems" in str(refused.value)


@pytest.mark.parametrize("given", [{"allowed_token_ids": [28]}, {"bad_words": ["y", "yes"]}])
def test_a_grammar_of_which_the_other_fields_leave_nothing_is_the_clients_mistake(
    cluster: Cluster, given: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"at position 0|be token 0"):
        _ask(cluster, guided_regex="yes", **given)


def test_the_record_says_which_grammar_it_was_and_no_log_has_the_schema(cluster: Cluster) -> None:
    schema = {"type": "object", "properties": {"zq_private": {"type": "integer"}}, "required": ["zq_private"]}
    answers = [
        _ask(cluster, **{field: given}) for field, given in (("guided_json", schema), ("response_format", FORMAT))
    ]
    digests = [_digest(cluster, answer) for answer in answers]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert len(set(digests)) == 2
    assert _digest(cluster, _ask(cluster, structured_outputs={"json": schema})) == digests[0]
    with pytest.raises(openai.BadRequestError):
        _ask(cluster, guided_json=schema | {"uniqueItems": True})
    assert not [path.name for path in cluster.log_dir.glob("*") if "zq_private" in path.read_text(encoding="utf-8")]
