"""Inputs of this area: messages for workers, frames for their streams, events of workers, and announcements.

The first byte of a message for a worker says how a stranger sends it. In it, the values of `TICKET` stand for those of
a ticket that was just granted.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from random import Random

from google.protobuf.message import Message

from pdserve.base.sampling import SamplingParams
from pdserve.base.wire import sampling_to_wire
from pdserve.net.frames import framed
from pdserve.v1 import common_pb2, decode_pb2, diagnostics_pb2, prefill_pb2
from tests.fuzz.files.mutations import damaged_bytes
from tests.fuzz.messages import damaged_message
from tests.support.tiny_model import tokens_of

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
#: Longest stretch of a stranger's frames.
_MAX_FRAMES = 6
TICKET = decode_pb2.Ticket(
    transfer_id=b"the transfer id!",
    attempt=1,
    worker_id="decode",
    epoch=4242,
    grpc_address="127.0.0.1:1",
    transport="inproc",
    data_address=b"the data address",
    first_block=0,
    num_blocks=12,
    layout=decode_pb2.KvLayout(
        model="the model", dtype="float32", block_size=4, num_layers=2, num_kv_heads=2, head_dim=8
    ),
    lease_s=5.0,
    key=b"the key with thirty-two bytes!!!",
    tag_base=77 << 20,
    layer_groups=1,
    bundle_blocks=1,
    digest="xxh3",
)
#: Stands for the MAC that belongs to the rest of a commit.
SIGNED = b"signed with the key of the ticket"
_REF = common_pb2.RequestRef(request_id="fuzzed", attempt=1, router_id="router")
_SAMPLING = sampling_to_wire(
    SamplingParams(temperature=0.7, max_tokens=6, ignore_eos=True, seed=5, logit_bias={5: 1.0})
)
_START = decode_pb2.DecodeStart(ref=_REF, prompt_token_ids=PROMPT, sampling=_SAMPLING, cache_salt=b"s")
_LOCAL = decode_pb2.DecodeStart(
    ref=_REF, prompt_token_ids=PROMPT, sampling=_SAMPLING, local_prefill_threshold=2**32 - 1
)
_PROMPT = prefill_pb2.PrefillRequest(ref=_REF, prompt_token_ids=PROMPT, sampling=_SAMPLING)
_HANDED_OVER = prefill_pb2.PrefillRequest(ref=_REF, prompt_token_ids=PROMPT, sampling=_SAMPLING, ticket=TICKET)
_INTRODUCTION = decode_pb2.IntroduceRequest(
    own=[decode_pb2.DataConnection(source="127.0.0.1:40000", target="127.0.0.1:19600")],
    unknown=[decode_pb2.DataConnection(source="127.0.0.1:40001", target="127.0.0.1:19601")],
    nonce=b"the nonce, 16 by",
)
_DATA_ADDRESS_REQUEST = decode_pb2.GetDataAddressRequest(nonce=b"the nonce, 16 by")
_COMMIT = decode_pb2.CommitRequest(
    ref=_REF, transfer_id=TICKET.transfer_id, epoch=TICKET.epoch, digests=[b"d" * 16] * 12, first_tokens=[5], mac=SIGNED
)
_COMMANDS = (
    decode_pb2.DecodeRequest(start=_START),
    decode_pb2.DecodeRequest(renew_ticket=decode_pb2.RenewTicket(attempt=2)),
    decode_pb2.DecodeRequest(prefill_locally=decode_pb2.PrefillLocally(attempt=2, forced_first_tokens=[5])),
    decode_pb2.DecodeRequest(prefill_locally=decode_pb2.PrefillLocally(attempt=2)),
    decode_pb2.DecodeRequest(keep_lease=decode_pb2.KeepLease()),
    decode_pb2.DecodeRequest(stop_choice=decode_pb2.StopChoice(choice_index=0)),
    decode_pb2.DecodeRequest(stop_choice=decode_pb2.StopChoice(choice_index=7)),
    decode_pb2.DecodeRequest(
        replicate_to=decode_pb2.ReplicateTo(worker_id="decode-1", epoch=7, grpc_address="127.0.0.1:1")
    ),
    decode_pb2.DecodeRequest(),
)
PROBES = (diagnostics_pb2.ReceiveProbeRequest, diagnostics_pb2.SendProbeRequest, decode_pb2.CommitRequest)
_HELLO = tokens_of("Hello")
_TOKENS = common_pb2.ChoiceTokens(first_index=1, token_ids=_HELLO[1:], finish_reason=common_pb2.FINISH_REASON_LENGTH)
_LOGPROBS = [common_pb2.TokenLogprobs(logprob=-0.5, rank=1, top_ids=[1], top_logprobs=[-0.5])] * 4
_EVENTS = (
    decode_pb2.DecodeResponse(ticket=decode_pb2.TicketGranted(ticket=TICKET, reserve_s=0.1)),
    decode_pb2.DecodeResponse(started=decode_pb2.DecodeStarted(prefilled_locally=True, cached_tokens=3, queue_s=0.1)),
    decode_pb2.DecodeResponse(tokens=decode_pb2.DecodeTokens(choices=[_TOKENS])),
    decode_pb2.DecodeResponse(
        tokens=decode_pb2.DecodeTokens(choices=[common_pb2.ChoiceTokens(token_ids=_HELLO[:4], logprobs=_LOGPROBS)])
    ),
    decode_pb2.DecodeResponse(failed=common_pb2.Error(name="Overloaded", text="full", retry_after_s=1.0)),
    decode_pb2.DecodeResponse(failed=common_pb2.Error(name="RequestError", text="wrong", param="prompt")),
    decode_pb2.DecodeResponse(progress=decode_pb2.DecodeProgress(computed_tokens=4)),
    decode_pb2.DecodeResponse(replica_wanted=decode_pb2.ReplicaWanted(failed_epoch=7)),
    decode_pb2.DecodeResponse(ended=decode_pb2.DecodeEnded()),
    decode_pb2.DecodeResponse(),
)
_PREFILL_EVENTS = (
    prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress(computed_tokens=4, computing_s=0.1)),
    prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress(queued=True, cached_tokens=4)),
    prefill_pb2.PrefillResponse(
        first_token=prefill_pb2.PrefillFirstToken(choices=[common_pb2.ChoiceTokens(token_ids=_HELLO[:1])])
    ),
    prefill_pb2.PrefillResponse(done=prefill_pb2.PrefillDone(queue_s=0.1, compute_s=0.1, sent_bytes=10, chunks=1)),
    prefill_pb2.PrefillResponse(),
)


class Sender(IntEnum):
    """Who sends a message to a worker."""

    #: Anybody, to a cluster without a secret.
    OPEN = 0
    #: Without the secret, to a cluster that has one.
    STRANGER = 1
    #: With another secret.
    FOREIGN = 2
    #: With the secret; then one bit is another.
    TAMPERED = 3


def start(random: Random) -> bytes:
    """A request for a decode worker."""
    return _sent(random, random.choice((_START, _LOCAL)))


def prompt(random: Random) -> bytes:
    """A prompt for a prefill worker."""
    return _sent(random, random.choice((_PROMPT, _HANDED_OVER, _HANDED_OVER)))


def commit(random: Random) -> bytes:
    """A commit of a transfer."""
    return _sent(random, _COMMIT)


def introduction(random: Random) -> bytes:
    """An introduction of connections."""
    return _sent(random, _INTRODUCTION)


def data_address_request(random: Random) -> bytes:
    """A question for the data address."""
    return _sent(random, _DATA_ADDRESS_REQUEST)


def probe(random: Random) -> bytes:
    """A test transfer: the number of its message, and the message."""
    number = random.randrange(len(PROBES))
    seeds: tuple[Message, ...] = (
        diagnostics_pb2.ReceiveProbeRequest(num_bytes=1000),
        diagnostics_pb2.SendProbeRequest(ticket=TICKET, request_id="fuzzed"),
        _COMMIT,
    )
    return bytes((number,)) + damaged_message(seeds[number], random)


def commands(random: Random) -> bytes:
    """Commands that follow a valid request, whose prompt is computed by the decode worker if the first byte is odd."""
    frames = [_frame(random.choice(_COMMANDS), random) for _ in range(random.randint(1, _MAX_FRAMES))]
    return bytes((random.randrange(2),)) + _cut(b"".join(frames), random)


def stream(random: Random) -> bytes:
    """Bytes for a worker's stream address, from the first on."""
    kind = random.randrange(6)
    if kind == 0:
        return random.randbytes(random.choice((1, 3, 4, 40)))
    if kind == 1:
        return struct.pack(">I", random.choice((2**32 - 1, 2**26, 300_000, 10))) + b"x" * random.choice((0, 9, 5000))
    if kind == 2:  # Thousands of messages in a few bytes each.
        first = decode_pb2.DecodeRequest(start=random.choice((_START, _LOCAL)))
        return framed(first.SerializeToString()) + framed(random.choice(_COMMANDS).SerializeToString()) * 20_000
    frames = [_frame(random.choice(_COMMANDS), random) for _ in range(random.randint(1, _MAX_FRAMES))]
    return _cut(b"".join(frames), random)


def events(random: Random) -> bytes:
    """What a decode worker sends to a router."""
    frames = [_frame(random.choice(_EVENTS), random) for _ in range(random.randint(1, _MAX_FRAMES))]
    return _cut(b"".join(frames), random)


def prefill_events(random: Random) -> bytes:
    """What a prefill worker sends to a router, as frames."""
    return b"".join(_frame(random.choice(_PREFILL_EVENTS), random) for _ in range(random.randint(1, _MAX_FRAMES)))


def control(random: Random) -> bytes:
    """Announcements of messages to the transport of torch.distributed."""
    number = random.choice((1, 2, 10, 20_000))
    announced = b"".join(
        struct.pack("<QQ", random.choice((0, 1, 2**64 - 1)), random.choice((0, 1, 2**30, 2**63))) for _ in range(10)
    )
    return (announced * number)[: random.choice((8, 15, 16, 161, 320_000))]


def address(random: Random) -> bytes:
    """The data address of a ticket."""
    seeds = (b"pdnccl2 127.0.0.1 - 1 2", b"pdnccl2 host GPU-1 65535 65536", b"pdux1" + b"\x00" * 20)
    return damaged_bytes(random.choice(seeds), random) * random.choice((1, 1, 1, 500))


def _sent(random: Random, message: Message) -> bytes:
    sender = random.choice(tuple(Sender))
    if sender is Sender.TAMPERED:
        return bytes((sender, random.randrange(256))) + message.SerializeToString()
    return bytes((sender, 0)) + damaged_message(message, random)


def _frame(message: Message, random: Random) -> bytes:
    return framed(damaged_message(message, random) if random.random() < 0.6 else message.SerializeToString())


def _cut(data: bytes, random: Random) -> bytes:
    """Sometimes with a part missing, or damaged."""
    chance = random.random()
    if chance < 0.15:
        return data[: random.randrange(len(data) + 1)]
    return damaged_bytes(data, random) if chance < 0.25 else data
