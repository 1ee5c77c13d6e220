"""What is kept of a stream in Redis comes back as it was, or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import StoreError
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams, TokenLogprobs
from pdserve.model.tokenizer_file import read_tokenizer
from pdserve.peers.secret import parse_secret
from router_svc.generation import Generation, TextRules
from router_svc.records.resumable import (
    Charge,
    LoggedStep,
    ResponseShape,
    Resumable,
    request_from_bytes,
    request_to_bytes,
    single_tokens,
    steps_from_bytes,
    steps_to_bytes,
)
from router_svc.records.stream_seal import StreamSeal
from router_svc.records.usage import Usage
from router_svc.request.output import ChoiceDelta, Output
from tests.support.tiny_model import END, tokens_of

LAYOUT = KvLayout.uniform(model="m", dtype="float32", block_size=16, num_layers=2, num_kv_heads=1, head_dim=8)
SHAPE = ResponseShape(
    response_id="chatcmpl-a",
    header_id="a",
    model="tiny",
    created=1_790_000_000,
    include_usage=True,
    continuous_usage=False,
    echoes=("é", ""),
)


def generation(index: int, first_choice: int, **more: object) -> Generation:
    request_id = RequestId(f"chatcmpl-a:{index}" if index else "chatcmpl-a")
    fields: dict[str, object] = {
        "sampling": SamplingParams(
            temperature=0.7, top_k=3, seed=-(2**62), logprobs=0, n=2, logit_bias={5: -1.5}, stop_token_ids=(9,)
        ),
        "text": TextRules(
            stop=("\n", "é"), include_stop_str_in_output=True, skip_special_tokens=False, unfinished=b"\xf0\x9f"
        ),
    }
    return Generation(
        request_id=request_id,
        worker_request_id=RequestId(f"{request_id}-f00d"),
        prompt=(1, 2, 257),
        first_choice=first_choice,
        priority=-3,
        cache_salt=b"\x00salt",
        endpoint="/v1/chat/completions",
        **(fields | more),  # type: ignore[arg-type]
    )


RESUMABLE = Resumable(shape=SHAPE, generations=(generation(0, 0), generation(1, 2)), model_revision="c0ffee")


def test_a_request_comes_back_with_new_ids_for_workers() -> None:
    assert request_from_bytes(request_to_bytes(RESUMABLE), suffix="f00d") == RESUMABLE


def test_steps_come_back_with_exact_log_probabilities() -> None:
    logprobs = TokenLogprobs(logprob=-0.125, rank=1, top_ids=(1, 2), top_logprobs=(-0.125, float("-inf")))
    choices = (
        ChoiceTokens(choice_index=1, first_index=0, token_ids=(5,), logprobs=(logprobs,)),
        ChoiceTokens(choice_index=0, first_index=7, token_ids=(), finish_reason=FinishReason.STOP, stop_token_id=9),
    )
    steps = [
        LoggedStep(prompt_index=1, choices=choices, cached_tokens=48, layout=LAYOUT),
        LoggedStep(prompt_index=0, choices=choices[:1], cached_tokens=0),
    ]
    assert [*steps_from_bytes(steps_to_bytes(steps))] == steps


@given(st.binary(max_size=200))
def test_other_bytes_are_an_error_and_nothing_else(data: bytes) -> None:
    for read in (
        lambda each: [*steps_from_bytes(each)],
        lambda each: request_from_bytes(each, suffix="0"),
        Charge.from_text,
    ):
        with contextlib.suppress(StoreError):
            read(data)


def test_charges_come_back() -> None:
    charge = Charge(usage=Usage(requests=1, input_tokens=20, cached_tokens=16, output_tokens=5), limit_tokens=25)
    assert Charge.from_text(charge.to_text().encode()) == charge


def streamed(model_dir: Path, chunks: list[ChoiceTokens], text: TextRules) -> list[ChoiceDelta]:
    sampling = SamplingParams(max_tokens=100)
    output = Output(generation(0, 0, sampling=sampling, text=text), read_tokenizer(model_dir))
    return output.push(single_tokens(chunks))


@pytest.mark.parametrize("stop", [(), ("wor",), ("d.",), ("llo w",), ("\ufffd",)])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_output_that_was_kept_gives_the_same_events_whatever_the_messages_were(
    model_dir: Path, stop: tuple[str, ...], finish: FinishReason
) -> None:
    """Text that is held back for a stop string or a character, the end, and its reason."""
    token_ids = (*tokens_of("Hällo wörld."), 0xC3, *((END,) if finish is FinishReason.STOP else ()))
    text = TextRules(stop=stop)

    def chunk(first: int, last: int) -> ChoiceTokens:
        is_end = last == len(token_ids)
        return ChoiceTokens(
            choice_index=0,
            first_index=first,
            token_ids=token_ids[first:last],
            finish_reason=finish if is_end else None,
            stop_token_id=END if is_end and finish is FinishReason.STOP else None,
        )

    singly = streamed(model_dir, [chunk(at, at + 1) for at in range(len(token_ids))], text)
    at_once = streamed(model_dir, [chunk(0, 3), chunk(3, len(token_ids))], text)
    assert at_once == singly
    assert singly[-1].finish_reason is not None
    kept = steps_to_bytes(
        LoggedStep(prompt_index=0, choices=(each.source,), cached_tokens=0) for each in singly if each.source
    )
    assert streamed(model_dir, [each for step in steps_from_bytes(kept) for each in step.choices], text) == singly


FIRST, SECOND = "first-secret-0123456789", "second-secret-0123456789"


def test_a_piece_is_opened_with_its_secret_in_its_stream_and_at_its_index() -> None:
    seal = StreamSeal(parse_secret(FIRST, where="test"))
    stored = seal.seal(b"a prompt", "s1", 3)
    assert b"a prompt" not in stored
    assert seal.open(stored, "s1", 3) == b"a prompt"
    others = [
        (seal, stored, "s2", 3),
        (seal, stored, "s1", 4),
        (seal, stored[:-1], "s1", 3),
        (seal, b"", "s1", 3),
        (seal, b"\x00a prompt", "s1", 3),
        (StreamSeal(parse_secret(SECOND, where="test")), stored, "s1", 3),
        (StreamSeal(None), stored, "s1", 3),
    ]
    for reader, piece, stream, index in others:
        with pytest.raises(StoreError, match="not from this cluster"):
            reader.open(piece, stream, index)


def test_secrets_are_replaced_without_losing_streams() -> None:
    before = StreamSeal(parse_secret(FIRST, where="test"))
    between = StreamSeal(parse_secret(f"{SECOND} {FIRST}", where="test"))
    assert between.open(before.seal(b"x", "s", 0), "s", 0) == b"x"
    opening = StreamSeal(parse_secret(f"open {FIRST}", where="test"))
    plain = opening.seal(b"x", "s", 0)
    assert plain == b"\x00x"
    assert opening.open(before.seal(b"x", "s", 0), "s", 0) == opening.open(plain, "s", 0) == b"x"
    assert StreamSeal(None).open(plain, "s", 0) == b"x"
