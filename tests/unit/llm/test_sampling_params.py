"""SamplingParams: vLLM's defaults, the fields of requests, and errors that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve import SamplingParams, StructuredOutputsParams
from router_svc.api.body import SamplingFields
from router_svc.api.openai.schema import ChatBody, CompletionBody

OTHERS = {"structured_outputs", "truncate_prompt_tokens", "logprobs", "prompt_logprobs"}
BODY_FIELDS = set(SamplingFields.model_fields) | OTHERS


def test_vllms_defaults_are_sent_where_the_model_has_its_own() -> None:
    fields = SamplingParams().as_fields()
    expected = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    assert expected.items() <= fields.items()
    assert fields["max_tokens"] == 16
    assert "seed" not in fields


def test_every_field_of_the_server_has_one_here() -> None:
    assert set(SamplingParams.__dataclass_fields__) >= BODY_FIELDS


def test_what_is_set_is_sent_and_the_server_reads_it() -> None:
    params = SamplingParams(
        n=2,
        temperature=0.5,
        seed=-3,
        stop="end",
        stop_token_ids=[4],
        bad_words=["no"],
        logit_bias={7: 1.5},
        allowed_token_ids=[1, 2],
        logprob_token_ids=[3],
        logprobs=2,
        truncate_prompt_tokens=-1,
        max_tokens=None,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True),
    )
    fields = params.as_fields()
    assert fields["logit_bias"] == {"7": 1.5}
    assert fields["structured_outputs"] == {"json": {"type": "object"}, "disable_any_whitespace": True}
    assert "max_tokens" not in fields
    body = CompletionBody.model_validate({"model": "m", "prompt": "p", "logprobs": 2, **fields})
    assert (body.seed, body.stop, body.truncate_prompt_tokens) == (-3, ["end"], -1)
    ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "`n`"),
        ({"logprobs": -1}, "`logprobs` is -1, but must be from 0 to 20"),
        ({"logprobs": 21}, "`logprobs` is 21"),
        ({"prompt_logprobs": 21}, "`prompt_logprobs` is 21, but must be from 0 to 20"),
        ({"detokenize": False}, "`detokenize` is False.*token_ids"),
        ({"spaces_between_special_tokens": False}, "`spaces_between_special_tokens`"),
        ({"thinking_token_budget": -2}, "`thinking_token_budget` is -2, but must be from -1"),
        ({"repetition_detection": {}}, "`repetition_detection`.*frequency_penalty"),
        ({"extra_args": {"a": 1}}, "`extra_args`"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_what_no_server_would_take_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)


def test_a_wrong_change_is_noticed_when_it_is_used() -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(ValueError, match="temperature"):
        params.as_fields()


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "json": {"type": "object"}}, {"json_object": False}])
def test_a_structure_is_exactly_one(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one of json, regex"):
        StructuredOutputsParams(**fields)
