"""Tokens in any order become text in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.base.errors import TransferError
from pdserve.base.ids import RequestId
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams, TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from pdserve.model.tokenizer_file import read_tokenizer
from router_svc.generation import Generation, TextRules
from router_svc.request.output import ChoiceDelta, Output, ended_by_stop_string
from tests.support.tiny_model import END, tokens_of


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return read_tokenizer(model_dir)


def output(
    tokenizer: Tokenizer, *, n: int = 1, min_tokens: int = 0, text: TextRules | None = None, **more: object
) -> Output:
    sampling = SamplingParams(n=n, min_tokens=min_tokens, max_tokens=100, **more)  # type: ignore[arg-type]
    request_id = RequestId("cmpl-1")
    return Output(
        Generation(
            request_id=request_id,
            worker_request_id=request_id,
            prompt=(1, 2, 3),
            sampling=sampling,
            text=text or TextRules(),
            endpoint="test",
        ),
        tokenizer,
    )


def chunk(
    text: str, first: int, *, choice: int = 0, finish: FinishReason | None = None, end: int | None = None
) -> ChoiceTokens:
    """Tokens of a text; `end` is a stop token after it."""
    token_ids = (*tokens_of(text), *([] if end is None else [end]))
    return ChoiceTokens(
        choice_index=choice,
        first_index=first,
        token_ids=token_ids,
        finish_reason=FinishReason.STOP if end is not None else finish,
        stop_token_id=end,
    )


def text_of(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_repeated_tokens_are_delivered_once(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    assert text_of(out.push([chunk("He", 0)])) == "He"
    assert out.push([chunk("He", 0)]) == []
    assert text_of(out.push([chunk("ello", 1)])) == "llo"
    assert out.completion_tokens == 5


def test_tokens_that_overtake_the_first_token_wait_for_it(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    assert out.push([chunk("el", 1)]) == []
    assert out.push([chunk("lo", 3)]) == []
    assert not out.has_tokens
    assert text_of(out.push([chunk("H", 0)])) == "Hello"


def test_early_tokens_wait_on_behind_a_message_without_tokens(tokenizer: Tokenizer) -> None:
    """They were taken at once, the last of them as the first token."""
    out = output(tokenizer)
    assert out.push([chunk("ello", 1)]) == out.push([chunk("", 0)]) == []
    assert text_of(out.push([chunk("H", 0)])) == "Hello"


def test_early_tokens_are_forgotten_with_the_worker_that_sent_them(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    out.push([chunk("XX", 1)])
    out.forget_early()
    assert text_of(out.push([chunk("H", 0), chunk("i", 1)])) == "Hi"


def test_a_skipped_token_is_an_error(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    out.push([chunk("H", 0)])
    with pytest.raises(TransferError, match="skipped tokens"):
        out.push([chunk("llo", 2)])


def test_a_character_split_over_several_tokens_appears_whole(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    first, second, third = (
        ChoiceTokens(choice_index=0, first_index=i, token_ids=(b,)) for i, b in enumerate("€".encode())
    )
    assert text_of(out.push([first])) == text_of(out.push([second])) == ""
    assert text_of(out.push([third])) == "€"


def test_an_incomplete_character_at_the_end_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    [delta] = out.push(
        [ChoiceTokens(choice_index=0, first_index=0, token_ids=(0xE2,), finish_reason=FinishReason.LENGTH)]
    )
    assert delta.text == "�"


def test_the_end_token_is_neither_text_nor_a_stop_reason(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, text=TextRules(skip_special_tokens=False))
    [delta] = out.push([chunk("Hi", 0, end=END)])
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("Hi", FinishReason.STOP, None)
    assert len(delta.token_ids) == 3


def test_a_requested_stop_token_is_the_stop_reason(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, stop_token_ids=(ord("!"),))
    [delta] = out.push([chunk("Hi", 0, end=ord("!"))])
    assert (delta.text, delta.stop_reason) == ("Hi", ord("!"))


def test_a_stop_token_is_text_if_the_request_includes_it(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, stop_token_ids=(ord("!"),), text=TextRules(include_stop_str_in_output=True))
    assert text_of(out.push([chunk("Hi", 0, end=ord("!"))])) == "Hi!"


def test_a_stop_string_ends_a_choice_at_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, n=2, text=TextRules(stop=("\n\n",)))
    out.push([chunk("a", 0), chunk("b", 0, choice=1)])
    deltas = out.push([chunk(" line\n\nmore", 1)])
    assert text_of(deltas) == " line"
    assert deltas[0].finish_reason is FinishReason.STOP
    assert deltas[0].stop_reason == "\n\n"
    assert out.completion_tokens == len("a line\n\n") + 1
    assert ended_by_stop_string(deltas) == [0]
    assert not out.is_finished
    assert out.push([chunk("late", 11)]) == []


def test_text_held_back_is_delivered_at_the_end(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, text=TextRules(stop=("STOP",)))
    assert text_of(out.push([chunk("a ST", 0)])) == "a "
    assert text_of(out.push([chunk("", 4, finish=FinishReason.LENGTH)])) == "ST"
    assert out.is_finished


def test_a_stop_string_that_begins_within_min_tokens_and_ends_after_them_stops(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, min_tokens=1, text=TextRules(stop=("END",)))
    deltas = [delta for index, token in enumerate("xENDy") for delta in out.push([chunk(token, index)])]
    assert (text_of(deltas), deltas[-1].stop_reason) == ("x", "END")
    out = output(tokenizer, min_tokens=2, text=TextRules(stop=("END",)))
    deltas = [delta for index, token in enumerate("ENDy") for delta in out.push([chunk(token, index)])]
    assert (text_of(deltas), deltas[-1].stop_reason) == ("", "END")


def test_a_stop_string_within_the_first_min_tokens_does_not_stop(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, min_tokens=6, text=TextRules(stop=("stop",)))
    assert text_of(out.push([chunk("a stop, and stop again", 0)])) == "a stop, and "


def test_first_tokens_are_known_only_for_all_choices(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, n=2)
    out.push([chunk("a", 0)])
    assert (out.has_tokens, out.has_first_tokens, out.first_tokens) == (True, False, [])
    out.push([chunk("b", 0, choice=1)])
    assert (out.has_first_tokens, out.first_tokens) == (True, [ord("a"), ord("b")])
    out.push([chunk("c", 1, choice=1)])
    assert (out.has_first_tokens, out.first_tokens) == (True, [ord("a"), ord("b")])


def test_logprobs_stay_with_their_tokens_when_some_tokens_are_repeated(tokenizer: Tokenizer) -> None:
    out = output(tokenizer, logprobs=0)
    entries = tuple(TokenLogprobs(logprob=-float(i), rank=1) for i in range(3))
    out.push([ChoiceTokens(choice_index=0, first_index=0, token_ids=(65,), logprobs=entries[:1])])
    [delta] = out.push([ChoiceTokens(choice_index=0, first_index=0, token_ids=(65, 66, 67), logprobs=entries)])
    assert (delta.token_ids, delta.logprobs) == ((66, 67), entries[1:])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (ChoiceTokens(choice_index=1, first_index=0, token_ids=(5,)), "choice 1"),
        (replace(chunk("x", 0), logprobs=(TokenLogprobs(logprob=-1, rank=1),)), "none has"),
    ],
)
def test_tokens_that_no_worker_sends_are_a_failed_transfer(
    tokenizer: Tokenizer, tokens: ChoiceTokens, words: str
) -> None:
    with pytest.raises(TransferError, match=words):
        output(tokenizer).push([tokens])


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        ((), "each has"),
        ((TokenLogprobs(logprob=float("nan"), rank=1),), "not a number"),
        ((TokenLogprobs(logprob=-1, rank=1, top_ids=(5,)),), "0 log-probabilities for 1 token"),
    ],
)
def test_log_probabilities_that_no_worker_sends_are_a_failed_transfer(
    tokenizer: Tokenizer, logprobs: tuple[TokenLogprobs, ...], words: str
) -> None:
    with pytest.raises(TransferError, match=words):
        output(tokenizer, logprobs=1).push(
            [ChoiceTokens(choice_index=0, first_index=0, token_ids=(5,), logprobs=logprobs)]
        )
