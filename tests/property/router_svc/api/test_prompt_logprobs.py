"""Shapes of the log-probabilities of prompts: for any tokens, texts and scores, each list has an entry per token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.sampling import TokenLogprobs
from pdserve.model.tokenizer import StreamDetokenizer, Tokenizer
from pdserve.model.tokenizer_file import read_tokenizer
from router_svc.api.openai.logprobs import TextOffsets, completion_chunks, completion_logprobs_pieces
from router_svc.api.openai.prompt_logprobs import EchoedPrompt, ScoredPrompt
from tests.support.tiny_model import START, VOCAB_SIZE, tokens_of, write_model

_TOKENS = st.integers(0, VOCAB_SIZE - 1)
_LOGPROBS = st.floats(max_value=0, allow_nan=False)


@st.composite
def _entries(draw: st.DrawFn, num_tokens: int, num_top: int) -> list[TokenLogprobs]:
    top = st.lists(_TOKENS, min_size=num_top, max_size=num_top, unique=True)
    return [
        TokenLogprobs(
            logprob=draw(_LOGPROBS),
            rank=draw(st.integers(1, VOCAB_SIZE)),
            top_ids=tuple(draw(top)),
            top_logprobs=tuple(draw(_LOGPROBS) for _ in range(num_top)),
        )
        for _ in range(num_tokens)
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = write_model(tmp_path_factory.mktemp("model"))
    return read_tokenizer(directory)


@given(data=st.data())
def test_every_list_has_an_entry_for_each_token(tokenizer: Tokenizer, data: st.DataObject) -> None:
    prompt = data.draw(st.lists(_TOKENS, min_size=1, max_size=12))
    output = data.draw(st.lists(_TOKENS, max_size=4))
    text = data.draw(st.one_of(st.just(tokenizer.decode(prompt, False)), st.text(max_size=8)))
    alternatives, num_top = data.draw(st.integers(0, 2)), data.draw(st.integers(2, 4))
    scores = data.draw(_entries(len(prompt) - 1, num_top))
    echoed = EchoedPrompt(token_ids=prompt, text=text, scores=scores, alternatives=alternatives, listed=(65, 66))
    chunks = [
        *echoed.chunks(tokenizer),
        *completion_chunks(
            output, data.draw(_entries(len(output), 1)), tokenizer, TextOffsets(StreamDetokenizer(tokenizer), len(text))
        ),
    ]
    shaped = json.loads(b"".join(completion_logprobs_pieces(chunks)))
    assert {name: len(values) for name, values in shaped.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), len(prompt) + len(output)
    )
    assert shaped["token_logprobs"][0] is shaped["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in shaped["token_logprobs"][1:])
    # The likeliest, those that are listed, and the token itself.
    assert all(1 <= len(each) <= alternatives + 2 + 1 for each in shaped["top_logprobs"][1 : len(prompt)])
    offsets = shaped["text_offset"][: len(prompt)]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    assert shaped["text_offset"][len(prompt) : len(prompt) + 1] == [len(text)] * bool(output)
    by_id = json.loads(b"".join(ScoredPrompt(token_ids=prompt, alternatives=alternatives).pieces(scores, tokenizer)))
    assert by_id[0] is None
    for token, entry in zip(prompt[1:], by_id[1:], strict=True):
        assert str(token) in entry
        assert alternatives <= len(entry) <= alternatives + 1


@given(text=st.text(min_size=1, max_size=20))
def test_offsets_point_to_the_tokens_in_the_text_also_behind_one_that_it_does_not_show(
    tokenizer: Tokenizer, text: str
) -> None:
    """Fails if offsets add up the lengths of the tokens' texts: the tokenizer's own, and halves of characters."""
    token_ids = [START, *tokens_of(text)]
    scores = [TokenLogprobs(logprob=-1.0, rank=1)] * (len(token_ids) - 1)
    echoed = EchoedPrompt(token_ids=token_ids, text=text, scores=scores, alternatives=0)
    offsets = [offset for chunk in echoed.chunks(tokenizer) for offset in chunk["text_offset"]]
    characters = [0, *(index for index, character in enumerate(text) for _ in character.encode())]
    assert offsets == characters
