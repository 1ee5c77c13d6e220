"""The secrets of a cluster: services take them as they are, and no two clusters have the same."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from pdserve.cli.cluster_secrets.certificates import PEER_NAME, VALIDITY, peer_certificates
from pdserve.cli.cluster_secrets.contents import (
    API_KEYS,
    CLUSTER_SECRET,
    METRICS_KEY,
    PEER_CERTIFICATE,
    SMOKE_TEST_KEY,
    new_secrets,
)
from pdserve.peers.secret import parse_secret
from router_svc.clients.keys import KeyTable, parse_keys

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def files() -> dict[str, bytes]:
    return {name: content for group in new_secrets(NOW) for name, content in group.files.items()}


def test_the_first_key_is_an_admins_and_in_no_file() -> None:
    *_, group = new_secrets(NOW)
    assert group.api_key is not None
    assert not any(group.api_key.encode() in content for content in group.files.values())
    first = KeyTable(parse_keys(group.files[API_KEYS].decode(), API_KEYS)).find(group.api_key)
    assert first is not None
    assert first.client.is_admin
    assert first.client.id == "first"


def test_the_other_keys_are_those_of_the_files_and_of_no_admin() -> None:
    made = files()
    table = KeyTable(parse_keys(made[API_KEYS].decode(), API_KEYS))
    metrics, smoke_test = (table.find(made[name].decode()) for name in (METRICS_KEY, SMOKE_TEST_KEY))
    assert metrics is not None
    assert metrics.client.reads_metrics_only
    assert not metrics.client.is_admin
    assert smoke_test is not None
    assert not smoke_test.client.reads_metrics_only
    assert not smoke_test.client.is_admin


def test_the_key_of_the_smoke_test_suffices_for_its_job_and_for_little_else() -> None:
    made = files()
    smoke_test = KeyTable(parse_keys(made[API_KEYS].decode(), API_KEYS)).find(made[SMOKE_TEST_KEY].decode())
    assert smoke_test is not None
    limits = smoke_test.client.limits
    assert limits is not None
    # The Job has one question of 32 tokens and is repeated 4 times.
    assert 5 <= limits.requests_per_minute <= 20
    assert 5 * 200 <= limits.tokens_per_minute <= 10_000
    assert limits.parallel


def test_the_cluster_secret_is_one_that_services_take() -> None:
    assert parse_secret(files()[CLUSTER_SECRET].decode(), where="test").signs


def test_nothing_is_made_twice() -> None:
    first, second = files(), files()
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_peers_verify_each_other_with_the_certificate(tmp_path: Path) -> None:
    made = peer_certificates(datetime.now(UTC))
    for name, content in (("ca", made.authority), ("cert", made.certificate), ("key", made.key)):
        (tmp_path / name).write_bytes(content)

    def context(purpose: ssl.Purpose) -> ssl.SSLContext:
        found = ssl.create_default_context(purpose, cafile=str(tmp_path / "ca"))
        found.load_cert_chain(tmp_path / "cert", tmp_path / "key")
        # The strictest check that ssl has.
        found.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        found.verify_mode = ssl.CERT_REQUIRED
        return found

    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context(ssl.Purpose.CLIENT_AUTH).wrap_bio(to_server, to_client, server_side=True)
    client = context(ssl.Purpose.SERVER_AUTH).wrap_bio(to_client, to_server, server_hostname=PEER_NAME)
    pending = [client, server]
    while pending:
        for side in tuple(pending):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            pending.remove(side)
    assert client.getpeercert() == server.getpeercert()


def test_the_certificate_is_valid_for_years_and_for_hosts_whose_clocks_are_behind() -> None:
    certificate = x509.load_pem_x509_certificate(files()[PEER_CERTIFICATE])
    assert certificate.not_valid_before_utc <= NOW - timedelta(hours=1)
    assert certificate.not_valid_after_utc == NOW + VALIDITY
