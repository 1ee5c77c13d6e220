"""Worker records with a MAC: a router believes none that a stranger wrote, changed or kept."""

from __future__ import annotations

import pytest

from pdserve.base.errors import PeerRefused
from pdserve.base.ids import WorkerId
from pdserve.peers.record_fields import record_from_fields, record_to_fields
from pdserve.peers.sealed_record import RecordChecks, sealed_record
from pdserve.peers.seals import FRESH_S, Refusal, Seals
from pdserve.peers.secret import parse_secret
from pdserve.peers.workers import Sighting
from tests.support.records import worker_record

SECRET = parse_secret("the-secret-of-this-cluster", where="test")
NOW = 1_000_000.0
DECODE = WorkerId("decode-0")


class Router:
    """A router that reads records."""

    def __init__(self, text: str = "the-secret-of-this-cluster") -> None:
        self.now = NOW
        self.refused: list[Refusal] = []
        seals = Seals(parse_secret(text, where="test"), on_refused=self.refused.append)
        self.checks = RecordChecks(seals, clock=lambda: self.now)

    def read(self, fields: dict[str, str], worker_id: WorkerId = DECODE) -> None:
        found = {name: value.encode() for name, value in fields.items()}
        self.checks.require_signed(worker_id, found)
        self.checks.require_newest(Sighting(record=record_from_fields(worker_id, found), beat=int(found["beat"])))


@pytest.fixture
def router() -> Router:
    return Router()


def written(*, epoch: int = 1, beat: int = 1, now: float = NOW) -> dict[str, str]:
    """What a worker of the cluster writes."""
    fields = {**record_to_fields(worker_record(epoch=epoch)), "beat": str(beat)}
    return sealed_record(SECRET, DECODE, fields, now=now)


def test_the_records_of_the_cluster_are_read(router: Router) -> None:
    for beat in (1, 2, 2, 3):
        router.read(written(beat=beat))
    router.read(written(epoch=2))
    assert router.refused == []


@pytest.mark.parametrize("name", ["stream_address", "grpc_address", "epoch", "ready", "beat", "sealed_at_ms", "mac"])
def test_a_changed_field_is_refused(router: Router, name: str) -> None:
    fields = written()
    fields[name] = "9" + fields[name][1:] if fields[name][0] != "9" else "8" + fields[name][1:]
    with pytest.raises(PeerRefused):
        router.read(fields)
    assert router.refused == [Refusal.FORGED]


def test_an_added_or_removed_field_is_refused(router: Router) -> None:
    for fields in ({**written(), "more": "1"}, {name: text for name, text in written().items() if name != "load"}):
        with pytest.raises(PeerRefused):
            router.read(fields)
    assert router.refused == [Refusal.FORGED] * 2


def test_fields_of_a_later_version_are_covered(router: Router) -> None:
    fields = {**record_to_fields(worker_record()), "beat": "1", "of_a_later_version": "x"}
    router.read(sealed_record(SECRET, DECODE, fields, now=NOW))


def test_the_record_of_one_worker_is_not_that_of_another(router: Router) -> None:
    with pytest.raises(PeerRefused):
        router.read(written(), WorkerId("decode-1"))


def test_a_record_without_a_mac_is_refused_unless_the_cluster_is_on_its_way(router: Router) -> None:
    fields = {**record_to_fields(worker_record()), "beat": "1"}
    with pytest.raises(PeerRefused):
        router.read(fields)
    on_its_way = Router("the-secret-of-this-cluster open")
    on_its_way.read(fields)
    assert router.refused == on_its_way.refused == [Refusal.MISSING]


def test_an_earlier_heartbeat_is_refused(router: Router) -> None:
    kept = written(beat=1)
    router.read(written(beat=2))
    with pytest.raises(PeerRefused):
        router.read(kept)
    assert router.refused == [Refusal.REPLAYED]


def test_a_replaced_incarnation_does_not_come_back(router: Router) -> None:
    kept = written(epoch=1, beat=900)
    router.read(kept)
    router.read(written(epoch=2))
    for router.now in (NOW, NOW + FRESH_S, NOW + 3 * FRESH_S):
        with pytest.raises(PeerRefused):
            router.read(kept)
    assert router.refused == [Refusal.REPLAYED, Refusal.REPLAYED, Refusal.STALE]


def test_a_kept_record_is_refused_by_a_router_that_has_just_started(router: Router) -> None:
    router.now = NOW + FRESH_S + 1
    with pytest.raises(PeerRefused):
        router.read(written())
    assert router.refused == [Refusal.STALE]


def test_an_open_cluster_writes_and_reads_what_it_did_before() -> None:
    fields = {**record_to_fields(worker_record()), "beat": "1"}
    assert sealed_record(None, DECODE, fields, now=NOW) == fields
    checks = RecordChecks(Seals())
    checks.require_signed(DECODE, {name: value.encode() for name, value in fields.items()})
    checks.require_newest(Sighting(record=worker_record(), beat=2))
    checks.require_newest(Sighting(record=worker_record(), beat=1))
