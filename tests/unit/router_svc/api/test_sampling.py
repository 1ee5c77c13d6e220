"""Parameters as workers receive them, from a client's fields and the model's defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError, TooLarge
from pdserve.base.sampling import SamplingParams
from pdserve.base.wire import sampling_to_wire
from router_svc.api.body import SamplingFields
from router_svc.api.generations import CHAT, COMPLETIONS, GenerationFactory
from router_svc.api.ids import Ids
from router_svc.api.parse import validate
from router_svc.api.sampling import MAX_LOGPROB_ENTRIES, MAX_PROMPT_LOGPROB_ENTRIES, EndpointFields
from router_svc.api.sampling_defaults import SamplingDefaults
from router_svc.api.served_model import ServedModel


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ServedModel:
    return ServedModel.load(model_dir, "tiny")


async def made(model: ServedModel, fields: dict[str, object]) -> SamplingParams:
    factory = GenerationFactory(model=model, max_model_len=100, ids=Ids.make("cmpl-", None), endpoint=COMPLETIONS)
    own = EndpointFields(max_tokens=4, default_max_tokens=None)
    [generation] = await factory.make(validate(SamplingFields, fields), own, [[1, 2, 3]])
    return generation.sampling


async def test_without_max_tokens_log_probabilities_get_as_many_tokens_as_their_bound_allows(
    model: ServedModel,
) -> None:
    """Finding 3. Fails without the bound in `_limit`: a request with defaults is then refused for its size."""
    factory = GenerationFactory(model=model, max_model_len=8000, ids=Ids.make("cmpl-", None), endpoint=COMPLETIONS)
    fields = validate(SamplingFields, {"n": 10})
    for logprobs, max_tokens in ((20, MAX_LOGPROB_ENTRIES // 210), (0, MAX_LOGPROB_ENTRIES // 10), (None, 7997)):
        own = EndpointFields(max_tokens=None, default_max_tokens=None, logprobs=logprobs)
        [generation] = await factory.make(fields, own, [[1, 2, 3]])
        assert generation.sampling.max_tokens == max_tokens


async def test_the_scores_of_a_request_are_bounded(model: ServedModel) -> None:
    """vLLM's `prompt_logprobs` took all memory. Fails without `require_few_scores`."""
    factory = GenerationFactory(model=model, max_model_len=8000, ids=Ids.make("cmpl-", None), endpoint=COMPLETIONS)
    fields = validate(SamplingFields, {"n": 2, "logprob_token_ids": [1, 2]})
    own = EndpointFields(max_tokens=0, default_max_tokens=None, logprobs=0, prompt_logprobs=5)
    length = MAX_PROMPT_LOGPROB_ENTRIES // (2 * (5 + 2 + 1))
    generations = await factory.make(fields, own, [[1] * (length - 7), [2] * 7])
    assert {(each.prompt_logprobs, each.sampling.max_tokens) for each in generations} == {(5, 0)}
    with pytest.raises(TooLarge, match="65536 log-probabilities"):
        await factory.make(fields, own, [[1] * (length - 7), [2] * 8])


@pytest.mark.parametrize("top_k", [2**31, 3_000_000_000, 2**32 - 1])
async def test_a_top_k_beyond_the_vocabulary_reaches_workers_as_no_limit(model: ServedModel, top_k: int) -> None:
    params = await made(model, {"top_k": top_k, "temperature": 0})
    assert (params.top_k, sampling_to_wire(params).top_k) == (0, 0)


async def test_a_top_k_within_the_vocabulary_is_kept(model: ServedModel) -> None:
    assert [(await made(model, {"top_k": k})).top_k for k in (-1, 0, 1, model.vocab_size - 1, model.vocab_size)] == [
        0,
        0,
        1,
        model.vocab_size - 1,
        0,
    ]


async def test_the_default_of_a_model_is_limited_like_a_client(model: ServedModel) -> None:
    own = replace(model, defaults=SamplingDefaults(top_k=2**31 - 1))
    assert (await made(own, {})).top_k == 0


async def test_each_field_of_a_generation_config_is_the_default_of_requests(model: ServedModel, tmp_path: Path) -> None:
    fields: dict[str, float] = {"temperature": 0.5, "top_p": 0.25, "top_k": 20, "min_p": 0.125}
    fields |= {"repetition_penalty": 1.25, "max_new_tokens": 7, "min_new_tokens": 2}
    text = json.dumps({**fields, "stop_strings": ["END"]})
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    own = replace(model, defaults=SamplingDefaults.from_dir(tmp_path))
    factory = GenerationFactory(model=own, max_model_len=100, ids=Ids.make("chatcmpl-", None), endpoint=CHAT)
    endpoint = EndpointFields(max_tokens=None, default_max_tokens=None)
    [generation] = await factory.make(validate(SamplingFields, {}), endpoint, [[1, 2, 3]])
    sampling = generation.sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (7, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 20, 0.125)
    assert (sampling.repetition_penalty, generation.text.stop) == (1.25, ("END",))


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_a_model_switches_top_k_off_as_a_client_does(model: ServedModel, tmp_path: Path, top_k: int) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": top_k}), encoding="utf-8")
    own = replace(model, defaults=SamplingDefaults.from_dir(tmp_path))
    assert (await made(own, {})).top_k == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": Infinity}',
        '{"temperature": NaN}',
        '{"temperature": 2.5}',
        '{"repetition_penalty": Infinity}',
        '{"repetition_penalty": 10.5}',
        '{"top_p": NaN}',
        '{"min_p": -Infinity}',
        '{"top_k": -7}',
    ],
)
def test_generation_defaults_outside_of_a_client_s_bounds_stop_the_router(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    [name] = json.loads(text)
    with pytest.raises(SetupError, match=rf"generation_config\.json is invalid[^$]*{name}"):
        SamplingDefaults.from_dir(tmp_path)
