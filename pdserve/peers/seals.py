"""Messages between the processes of a cluster with a secret: sealed by the sender, and opened once by the receiver.

A seal is a MAC over the message's bytes, its purpose, its receiver's incarnation, its time and a nonce. Other workers
therefore refuse a copy. The same worker refuses it because it knows the nonce, after `FRESH_S`, and after a restart.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError

from pdserve.base.errors import PeerRefused, RequestError
from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.logs import get_logger
from pdserve.peers.secret import ClusterSecret
from pdserve.v1.common_pb2 import Sealed
from pdserve.v1.decode_pb2 import (
    CommitRequest,
    DecodeStart,
    GetDataAddressRequest,
    GetDataAddressResponse,
    IntroduceRequest,
    IntroduceResponse,
    ReplicateRequest,
    Ticket,
)
from pdserve.v1.diagnostics_pb2 import (
    ChangeRoleRequest,
    DescribeRequest,
    DrainRequest,
    RebalanceRequest,
    ReceiveProbeRequest,
    SendProbeRequest,
)
from pdserve.v1.prefill_pb2 import PrefillRequest

log = get_logger(__name__)

Message = TypeVar(
    "Message",
    DecodeStart,
    PrefillRequest,
    CommitRequest,
    ReplicateRequest,
    Ticket,
    IntroduceRequest,
    IntroduceResponse,
    GetDataAddressRequest,
    GetDataAddressResponse,
    DescribeRequest,
    ReceiveProbeRequest,
    SendProbeRequest,
    DrainRequest,
    ChangeRoleRequest,
    RebalanceRequest,
)

#: Time for which a message may be on its way, the difference of two clocks included.
FRESH_S = 300.0
#: Interval of the log lines about refused messages of one kind.
_LOG_EVERY_S = 10.0
_NONCE_BYTES = 16


class Purpose(StrEnum):
    """What is sealed."""

    START = "decode_start"
    PROMPT = "prefill_request"
    COMMIT = "commit"
    REPLICA = "replicate_request"
    TICKET = "ticket"
    INTRODUCTION = "introduction"
    INTRODUCED = "answer_to_introduction"
    ADDRESS_REQUEST = "data_address_request"
    ADDRESS = "data_address"
    RECORD = "worker_record"
    DESCRIBE = "describe_request"
    PROBE = "test_transfer"
    DRAIN = "drain_request"
    ROLE = "role_request"
    REBALANCE = "rebalance_request"


class Refusal(StrEnum):
    """Why a message is not taken for one of this cluster. The values are labels of a metric."""

    #: It has no seal.
    MISSING = "missing"
    #: Another secret, another receiver, or other contents.
    FORGED = "forged"
    #: Too old, or from a clock that is far ahead.
    STALE = "stale"
    #: It was here before.
    REPLAYED = "replayed"


_TEXTS = {
    Refusal.MISSING: "It carries no MAC. Start every router and worker with the same --cluster-secret-file.",
    Refusal.FORGED: "Its MAC is not of this cluster's secret, or it was made for another worker. "
    "Start every router and worker with the same --cluster-secret-file.",
    Refusal.STALE: f"It was made more than {FRESH_S:g} s ago or ahead. Synchronize the clocks of the hosts.",
    Refusal.REPLAYED: "It has been here before.",
}


class SealRefusals:
    """Counts and logs messages of strangers; a flood of them fills no log."""

    def __init__(self, on_refused: Callable[[Refusal], None] = lambda reason: None) -> None:
        self._on_refused = on_refused
        self._unlogged: dict[tuple[Purpose, Refusal], int] = {}
        self._logged_at: dict[tuple[Purpose, Refusal], float] = {}

    def add(self, purpose: Purpose, reason: Refusal, **details: object) -> PeerRefused:
        """Takes note of a refusal. Returns the error for the sender."""
        self._on_refused(reason)
        kind, now = (purpose, reason), time.monotonic()
        self._unlogged[kind] = self._unlogged.get(kind, 0) + 1
        if now - self._logged_at.get(kind, float("-inf")) >= _LOG_EVERY_S:
            self._logged_at[kind] = now
            log.warning("peer_refused", message=purpose, reason=reason, count=self._unlogged.pop(kind), **details)
        return PeerRefused(f"The {purpose.replace('_', ' ')} is refused. {_TEXTS[reason]}")


class Seals:
    """Seals messages to other processes, and opens those that come to this one."""

    def __init__(
        self,
        secret: ClusterSecret | None = None,
        *,
        on_refused: Callable[[Refusal], None] = lambda reason: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Without a secret nothing is sealed, and everything is accepted. `clock`: seconds since 1970."""
        self.secret = secret
        self.refusals = SealRefusals(on_refused)
        self._clock = clock
        #: Nonces of fresh messages, with the time at which each one is stale; about in the order of these times.
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    @property
    def accepts_strangers(self) -> bool:
        """Whether there is a secret, but messages without it are accepted for the time being."""
        return self.secret is not None and self.secret.accepts_open

    def seal(self, purpose: Purpose, receiver: bytes, message: Message, *, once: bool = True) -> Message:
        """The message to send in place of `message`; in an open cluster, `message` itself.

        Without `once`, the receiver accepts copies, at any time.
        """
        if self.secret is None or not self.secret.signs:
            return message
        payload = message.SerializeToString()
        sealed = Sealed(payload=payload)
        if once:
            sealed.sealed_at_ms = int(self._clock() * 1000)
            sealed.nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed.mac = self.secret.mac(purpose, *_fields_of(receiver, sealed))
        return type(message)(sealed=sealed)

    def open(self, purpose: Purpose, receiver: bytes, message: Message, *, once: bool = True) -> Message:
        """The message that `seal` was given.

        Raises: PeerRefused when it is not from this cluster, not for `receiver`, not fresh, or not here for the first
            time; RequestError when it is none of this kind.
        """
        if message.HasField("sealed"):
            self._check(purpose, receiver, message.sealed, once=once)
            try:
                return type(message).FromString(message.sealed.payload)
            except DecodeError as error:
                raise RequestError(f"The sealed {purpose} cannot be read: {error}.") from error
        if self.secret is not None:
            if not self.secret.accepts_open:
                raise self.refusals.add(purpose, Refusal.MISSING)
            self.refusals.add(purpose, Refusal.MISSING, accepted=True)
        return message

    def _check(self, purpose: Purpose, receiver: bytes, sealed: Sealed, *, once: bool) -> None:
        if self.secret is None:
            return  # An open cluster accepts everybody.
        if not self.secret.matches(sealed.mac, purpose, *_fields_of(receiver, sealed)):
            raise self.refusals.add(purpose, Refusal.FORGED)
        if once:
            self._require_new(purpose, sealed)

    def _require_new(self, purpose: Purpose, sealed: Sealed) -> None:
        now = self._clock()
        while self._seen and next(iter(self._seen.values())) < now:
            self._seen.popitem(last=False)
        sealed_at = sealed.sealed_at_ms / 1000
        if abs(now - sealed_at) > FRESH_S:
            raise self.refusals.add(purpose, Refusal.STALE, age_s=round(now - sealed_at, 1))
        if sealed.nonce in self._seen:
            raise self.refusals.add(purpose, Refusal.REPLAYED)
        # The nonce is kept until the message is stale, even if its sender's clock is ahead.
        self._seen[sealed.nonce] = now + 2 * FRESH_S


def receiver_name(worker_id: WorkerId, epoch: Epoch) -> bytes:
    """An incarnation of a worker, as seals name it."""
    return f"{worker_id}/{epoch}".encode()


def _fields_of(receiver: bytes, sealed: Sealed) -> tuple[bytes, ...]:
    return receiver, sealed.sealed_at_ms.to_bytes(8, "little"), sealed.nonce, sealed.payload
