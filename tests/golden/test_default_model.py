"""The default model compared with transformers on the same converted checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.model.chat_template import ChatTemplate
from pdserve.model.loader import load_decoder
from pdserve.model.resolve import ResolvedModel
from pdserve.model.tokenizer import Tokenizer
from pdserve.model.tokenizer_file import read_tokenizer
from tests.golden.compare import assert_same, reference_logits
from tests.golden.paged import generate_greedily
from tests.golden.prompts import SHORT_PROMPTS, long_prompt
from tests.support.depth import IS_FULL
from tests.support.lazily import transformers

NEW_TOKENS = 32
#: Only the full depth has 1,500: the architectures' tests have long positions, too, on models that take less time.
LONG_TOKENS = 1500 if IS_FULL else 600
#: Mean difference in nats, over the 50 likeliest tokens, that rounding to bfloat16 in every op may cause.
BFLOAT16_TOLERANCE = 0.2

pytestmark = pytest.mark.slow


def encode_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    long = tokenizer.encode(long_prompt(LONG_TOKENS))[:LONG_TOKENS]
    assert len(long) == LONG_TOKENS
    return [*map(tokenizer.encode, SHORT_PROMPTS), long]


@pytest.mark.timeout(400)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(default_model: ResolvedModel) -> None:
    prompts = encode_prompts(read_tokenizer(default_model.path))
    assert len(prompts) >= 20
    if not IS_FULL:
        prompts = [*prompts[:-1:3], prompts[-1]]
    decoder = load_decoder(default_model.path, dtype="float32")
    outputs, logits = generate_greedily(decoder, prompts, NEW_TOKENS, chunk=400)

    model = transformers.AutoModelForCausalLM.from_pretrained(default_model.path, dtype=torch.float32).eval()
    for index, (prompt, output, ours) in enumerate(zip(prompts, outputs, logits, strict=True)):
        assert_same(ours, output, reference_logits(model, prompt, output), f"prompt {index}")


@pytest.mark.timeout(200)
def test_bfloat16_stays_close_to_float32(default_model: ResolvedModel) -> None:
    prompt = encode_prompts(read_tokenizer(default_model.path))[-1][:300]

    def scores(dtype: str) -> Tensor:
        decoder = load_decoder(default_model.path, dtype=dtype)
        _, logits = generate_greedily(decoder, [prompt[:200]], 1, chunk=64)
        return logits[0].log_softmax(-1)

    exact, rounded = scores("float32"), scores("bfloat16")
    likely = exact.topk(50).indices
    assert float((exact - rounded).gather(1, likely).abs().mean()) < BFLOAT16_TOLERANCE


def test_the_default_model_knows_the_capital_of_france(default_model: ResolvedModel) -> None:
    tokenizer = read_tokenizer(default_model.path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(ChatTemplate.from_dir(default_model.path).render(question), add_special_tokens=False)
    outputs, _ = generate_greedily(load_decoder(default_model.path), [prompt], 8)
    assert "Paris" in tokenizer.decode(outputs[0])


def test_prompts_are_rendered_and_encoded_as_by_transformers(default_model: ResolvedModel) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(default_model.path)
    ours = read_tokenizer(default_model.path)
    template = ChatTemplate.from_dir(default_model.path)
    for text in SHORT_PROMPTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
        for messages in (
            [{"role": "user", "content": text}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
        ):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert template.render(messages) == expected
