"""The largest message that a worker can need is within the limit on what it reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from pdserve.base.sampling import MAX_CONTINUED_TOKENS, MAX_LOGIT_BIAS, MAX_N, MAX_STOP_TOKEN_IDS, SamplingParams
from pdserve.base.wire import sampling_to_wire
from pdserve.v1 import common_pb2, decode_pb2, prefill_pb2
from pdserve.worker.serve.loaded_model import LoadedModel
from pdserve.worker.serve.message_limits import max_call_bytes, max_start_bytes

MAX_LEN, BLOCK_SIZE, LAYERS, LARGEST = 131_072, 16, 32, 2**32 - 1
MODEL = cast(
    LoadedModel,
    SimpleNamespace(
        limits=SimpleNamespace(max_model_len=MAX_LEN), layout=SimpleNamespace(block_size=BLOCK_SIZE, num_layers=LAYERS)
    ),
)
SAMPLING = sampling_to_wire(
    SamplingParams(
        logit_bias={LARGEST - each: -99.5 for each in range(MAX_LOGIT_BIAS)},
        stop_token_ids=(LARGEST,) * MAX_STOP_TOKEN_IDS,
    )
)
REF = common_pb2.RequestRef(request_id="r" * 300, attempt=LARGEST, router_id="x" * 16)


def test_the_longest_prompt_with_the_longest_output_is_within_the_limit() -> None:
    output = [
        decode_pb2.ChoiceOutput(choice_index=choice, token_ids=[LARGEST] * (MAX_CONTINUED_TOKENS // MAX_N))
        for choice in range(MAX_N)
    ]
    start = decode_pb2.DecodeStart(ref=REF, prompt_token_ids=[LARGEST] * MAX_LEN, sampling=SAMPLING, output=output)
    sealed = decode_pb2.DecodeStart(sealed=common_pb2.Sealed(payload=start.SerializeToString(), mac=bytes(32)))
    assert 0.6 * max_start_bytes(MODEL) < sealed.ByteSize() < max_start_bytes(MODEL)


def test_the_longest_prompt_with_a_ticket_and_its_commit_are_within_the_limit() -> None:
    ticket = decode_pb2.Ticket(data_address=bytes(65_536), key=bytes(32))
    ticket.sealed.payload = ticket.SerializeToString()
    prompt = prefill_pb2.PrefillRequest(
        ref=REF,
        prompt_token_ids=[LARGEST] * MAX_LEN,
        sampling=SAMPLING,
        ticket=ticket,
        forced_first_tokens=[LARGEST] * 128,
    )
    assert prompt.ByteSize() < max_call_bytes(MODEL)
    commit = decode_pb2.CommitRequest(ref=REF, digests=[bytes(16)] * (MAX_LEN // BLOCK_SIZE * LAYERS), mac=bytes(32))
    assert commit.ByteSize() < max_call_bytes(MODEL)
