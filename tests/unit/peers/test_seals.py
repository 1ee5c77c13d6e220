"""Sealed messages: what is forged, changed, for another worker, old or a copy is refused, counted and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from pdserve.base.errors import PeerRefused, RequestError
from pdserve.base.ids import Epoch, WorkerId
from pdserve.peers.seals import FRESH_S, Purpose, Refusal, Seals, receiver_name
from pdserve.peers.secret import ClusterSecret, parse_secret
from pdserve.v1 import decode_pb2 as pb
from pdserve.v1.common_pb2 import RequestRef, Sealed

SECRET = parse_secret("the-secret-of-this-cluster", where="test")
OTHER = parse_secret("the-secret-of-another-cluster", where="test")
HERE = receiver_name(WorkerId("d0"), Epoch(7))


class Receiver:
    """A worker that opens messages, with a clock and its refusals."""

    def __init__(self, text: str = "the-secret-of-this-cluster") -> None:
        self.now = 1_000_000.0
        self.refused: list[Refusal] = []
        self.seals = Seals(parse_secret(text, where="test"), on_refused=self.refused.append, clock=lambda: self.now)

    def open(self, message: pb.DecodeStart) -> pb.DecodeStart:
        return self.seals.open(Purpose.START, HERE, message)


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


def start() -> pb.DecodeStart:
    return pb.DecodeStart(ref=RequestRef(request_id="r1", attempt=1), prompt_token_ids=[1, 2, 300])


def sealed(receiver: Receiver, message: pb.DecodeStart | None = None) -> pb.DecodeStart:
    return Seals(SECRET, clock=lambda: receiver.now).seal(Purpose.START, HERE, message or start())


def test_what_is_sealed_is_opened_unchanged_and_shows_nothing_outside(receiver: Receiver) -> None:
    message = sealed(receiver)
    assert message == pb.DecodeStart(sealed=message.sealed)
    assert receiver.open(pb.DecodeStart.FromString(message.SerializeToString())) == start()
    assert receiver.refused == []


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


CHANGES: dict[str, Callable[[Sealed], object]] = {
    "payload": lambda message: setattr(message, "payload", _flip(message.payload)),
    "time": lambda message: setattr(message, "sealed_at_ms", message.sealed_at_ms + 1),
    "nonce": lambda message: setattr(message, "nonce", _flip(message.nonce)),
    "no_nonce": lambda message: setattr(message, "nonce", b""),
    "mac": lambda message: setattr(message, "mac", _flip(message.mac)),
    "no_mac": lambda message: setattr(message, "mac", b""),
    # The border between two fields moves.
    "border": lambda message: message.MergeFrom(
        Sealed(nonce=message.nonce + message.payload[:1], payload=message.payload[1:])
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_message_is_refused(receiver: Receiver, change: Callable[[Sealed], object]) -> None:
    message = sealed(receiver)
    change(message.sealed)
    with pytest.raises(PeerRefused, match="not of this cluster's secret"):
        receiver.open(message)
    assert receiver.refused == [Refusal.FORGED]


@pytest.mark.parametrize(
    ("secret", "purpose", "name"),
    [
        (OTHER, Purpose.START, HERE),
        (SECRET, Purpose.COMMIT, HERE),
        (SECRET, Purpose.START, receiver_name(WorkerId("d1"), Epoch(7))),
        # The same worker before its restart.
        (SECRET, Purpose.START, receiver_name(WorkerId("d0"), Epoch(6))),
    ],
)
def test_a_message_of_another_cluster_purpose_or_receiver_is_refused(
    receiver: Receiver, secret: ClusterSecret, purpose: Purpose, name: bytes
) -> None:
    message = Seals(secret, clock=lambda: receiver.now).seal(purpose, name, start())
    with pytest.raises(PeerRefused):
        receiver.open(message)
    assert receiver.refused == [Refusal.FORGED]


def test_a_copy_is_refused_for_as_long_as_it_would_be_fresh(receiver: Receiver) -> None:
    message = sealed(receiver)
    sent_at = receiver.now
    receiver.open(message)
    for receiver.now in (sent_at, sent_at + FRESH_S):
        with pytest.raises(PeerRefused, match="has been here before"):
            receiver.open(message)
    receiver.now = sent_at + FRESH_S + 1
    with pytest.raises(PeerRefused, match="clocks"):
        receiver.open(message)
    assert receiver.refused == [Refusal.REPLAYED, Refusal.REPLAYED, Refusal.STALE]


def test_a_copy_from_a_clock_that_is_ahead_is_refused_until_it_is_stale(receiver: Receiver) -> None:
    now = receiver.now
    receiver.now = now + FRESH_S
    message = sealed(receiver)
    receiver.now = now
    receiver.open(message)
    for age in (0, FRESH_S, 2 * FRESH_S):
        receiver.now = now + age
        with pytest.raises(PeerRefused, match="has been here before"):
            receiver.open(message)


def test_what_is_remembered_of_messages_is_forgotten_when_they_are_stale(receiver: Receiver) -> None:
    for _ in range(50):
        receiver.open(sealed(receiver))
    receiver.now += 2 * FRESH_S + 1
    receiver.open(sealed(receiver))
    assert len(receiver.seals._seen) == 1


def test_a_message_without_a_seal_is_refused(receiver: Receiver) -> None:
    with pytest.raises(PeerRefused, match="same --cluster-secret-file"):
        receiver.open(start())
    assert receiver.refused == [Refusal.MISSING]


def test_an_open_cluster_sends_and_takes_what_it_did_before_there_were_seals() -> None:
    seals = Seals()
    message = start()
    assert seals.seal(Purpose.START, HERE, message) is message
    assert seals.open(Purpose.START, HERE, message) is message
    assert not seals.accepts_strangers
    # A router that has a secret already.
    assert seals.open(Purpose.START, HERE, Seals(SECRET).seal(Purpose.START, HERE, message)) == message


def test_a_cluster_on_its_way_to_a_secret_counts_who_has_none() -> None:
    receiver = Receiver("the-secret-of-this-cluster open")
    assert receiver.seals.accepts_strangers
    assert receiver.open(start()) == start()
    assert receiver.open(sealed(receiver)) == start()
    assert receiver.refused == [Refusal.MISSING]
    before = Seals(parse_secret("open the-secret-of-this-cluster", where="test"))
    assert before.seal(Purpose.START, HERE, start()) == start()


def test_a_sealed_message_of_another_kind_is_an_error_of_the_request() -> None:
    message = pb.DecodeStart(sealed=Sealed(payload=b"\xff\xff"))
    with pytest.raises(RequestError, match="cannot be read"):
        Seals().open(Purpose.START, HERE, message)


def test_a_flood_of_refusals_fills_no_log(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            with pytest.raises(PeerRefused):
                receiver.open(start())
    assert len(receiver.refused) == 1000
    assert len([record for record in caplog.records if "peer_refused" in record.getMessage()]) == 1
