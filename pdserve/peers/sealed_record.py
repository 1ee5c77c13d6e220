"""Worker records in a cluster with a secret: signed by the worker, and checked by every router that reads them.

A copy of a record is worthless once the router has seen a later heartbeat or another incarnation of the worker, and
after `FRESH_S` in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pdserve.base.errors import PeerRefused
from pdserve.base.ids import Epoch, WorkerId
from pdserve.peers.seals import FRESH_S, Purpose, Refusal, SealRefusals, Seals
from pdserve.peers.secret import ClusterSecret
from pdserve.peers.workers import Sighting

_MAC, _SEALED_AT = "mac", "sealed_at_ms"


def sealed_record(
    secret: ClusterSecret | None, worker_id: WorkerId, fields: Mapping[str, str], *, now: float
) -> dict[str, str]:
    """The fields of a record with their MAC, `now` in seconds since 1970; unchanged without a secret."""
    if secret is None or not secret.signs:
        return dict(fields)
    sealed = {**fields, _SEALED_AT: str(int(now * 1000))}
    found = {name: value.encode() for name, value in sealed.items()}
    return {**sealed, _MAC: secret.mac(Purpose.RECORD, *_fields_of(worker_id, found)).hex()}


@dataclass(slots=True)
class _Newest:
    """The latest heartbeat of a worker that was accepted."""

    epoch: Epoch
    beat: int
    seen_at: float


class RecordChecks:
    """A router's judgement on the records that it reads. Belongs to the event loop."""

    def __init__(self, seals: Seals, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._secret = seals.secret
        self._refusals: SealRefusals = seals.refusals
        self._clock = clock
        self._newest: dict[WorkerId, _Newest] = {}
        #: Incarnations that others have replaced, with the time at which copies of their records are stale.
        self._replaced: dict[Epoch, float] = {}

    def require_signed(self, worker_id: WorkerId, found: Mapping[str, bytes]) -> None:
        """Raises: PeerRefused unless a process with the secret has written exactly these fields, lately."""
        if self._secret is None:
            return
        mac, sealed_at = found.get(_MAC), found.get(_SEALED_AT, b"")
        if mac is None:
            refusal = self._refused(Refusal.MISSING, worker_id)
            if self._secret.accepts_open:
                return
            raise refusal
        if not self._secret.matches(_from_hex(mac), Purpose.RECORD, *_fields_of(worker_id, found)):
            raise self._refused(Refusal.FORGED, worker_id)
        if abs(self._clock() - int(sealed_at) / 1000) > FRESH_S:
            raise self._refused(Refusal.STALE, worker_id)

    def require_newest(self, sighting: Sighting) -> None:
        """Raises: PeerRefused for an earlier heartbeat than one that was here, or an incarnation that was replaced."""
        if self._secret is None:
            return
        record, now = sighting.record, self._clock()
        self._forget_stale(now)
        newest = self._newest.get(record.worker_id)
        if newest is not None and newest.epoch != record.epoch:
            if record.epoch in self._replaced:
                raise self._refused(Refusal.REPLAYED, record.worker_id)
            self._replaced[newest.epoch] = now + 2 * FRESH_S
        elif newest is not None and sighting.beat < newest.beat:
            raise self._refused(Refusal.REPLAYED, record.worker_id)
        self._newest[record.worker_id] = _Newest(record.epoch, sighting.beat, now)

    def _refused(self, reason: Refusal, worker_id: WorkerId) -> PeerRefused:
        return self._refusals.add(Purpose.RECORD, reason, worker=worker_id)

    def _forget_stale(self, now: float) -> None:
        """Forgets heartbeats and incarnations whose copies are too old to be accepted."""
        self._replaced = {epoch: until for epoch, until in self._replaced.items() if until >= now}
        self._newest = {
            worker_id: newest for worker_id, newest in self._newest.items() if newest.seen_at + 2 * FRESH_S >= now
        }


def _fields_of(worker_id: WorkerId, found: Mapping[str, bytes]) -> Iterator[bytes]:
    """The worker and all fields but the MAC itself, also those of later versions."""
    yield worker_id.encode()
    for name in sorted(found):
        if name != _MAC:
            yield name.encode()
            yield found[name]


def _from_hex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode())
    except ValueError:
        return b""
