"""Who a caller is, by keys of a flag and of a file that changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from pdserve.base.errors import Forbidden, SetupError, Unauthorized
from router_svc.api.authentication import client_of
from router_svc.clients.access import Access, credentials_of
from router_svc.clients.keys import digest_of, parse_keys
from router_svc.request.client import Client

SEARCH = {"id": "search", "sha256": digest_of("search-key").hex()}


def write(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text(json.dumps({"keys": entries}), encoding="utf-8")
    return path


def test_without_keys_everybody_may_do_everything_and_is_an_address() -> None:
    client = Access().client(["whatever"], "10.0.0.7")
    assert (client.id, client.tenant, client.is_admin) == ("10.0.0.7", "", True)


@pytest.mark.parametrize("presented", [[], [""], ["on"], ["one "], ["ONE"], ["three"], ["one", "two"], ["é" * 2000]])
def test_only_a_known_key_is_taken(presented: list[str]) -> None:
    access = Access(["one", "two"])
    assert access.client(["one", "one"], "").id == "key-1"
    with pytest.raises(Unauthorized):
        access.client(presented, "10.0.0.7")


#: What became part of a query, a script, a pattern or a log line in other gateways.
INJECTED = [
    "' OR '1'='1",
    "x'; DROP TABLE keys; --",
    "one' --",
    "on*",
    "on%",
    "o.e",
    "${jndi:ldap://a}",
    "one\0",
    "\udcff",
]


@pytest.mark.parametrize("presented", INJECTED)
def test_a_key_is_never_an_order_or_a_pattern(presented: str) -> None:
    """CVE-2026-42208. Fails when keys are found by anything but the digest of all that was presented."""
    with pytest.raises(Unauthorized, match="unknown") as refused:
        Access(["one"]).client([presented], "10.0.0.7")
    assert presented not in str(refused.value)


def test_no_key_is_kept_so_that_none_can_be_compared_letter_by_letter(tmp_path: Path) -> None:
    """CVE-2025-59425: the time of a comparison told keys. Fails when the text of a key is kept, or compared by `==`."""
    access = Access(["swordfish-one"], write(tmp_path / "keys.json", SEARCH))
    seen: list[object] = [access]
    while seen:
        value = seen.pop()
        assert value not in ("swordfish-one", b"swordfish-one")
        if isinstance(value, dict):
            seen += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            seen += value
        elif type(value).__module__.startswith("router_svc"):
            names = (*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ()))
            seen += [getattr(value, name) for name in names]


def test_the_last_comparison_of_a_key_takes_the_same_time_wherever_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("router_svc.clients.keys.hmac.compare_digest", compare)
    assert Access(["one"]).client(["one"], "").id == "key-1"
    assert compared == [(digest_of("one"), digest_of("one"))]


def test_a_keys_file_gives_tenant_rights_and_weight(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "a"\nsha256 = "{digest_of("k").hex()}"\ntenant = "t"\nweight = 2\n', "utf-8")
    client = Access(path=path).client(["k"], "10.0.0.7")
    assert (client.id, client.tenant, client.weight, client.is_admin, client.priority_ceiling) == (
        "a",
        "t",
        2,
        False,
        0,
    )


def test_a_key_ends_at_its_expiry_and_opens_its_models_only(tmp_path: Path) -> None:
    now = 1_900_000_000.0
    path = write(tmp_path / "keys.json", SEARCH | {"expires": "2030-03-17T17:46:41Z", "models": ["other"]})
    with pytest.raises(Unauthorized, match="expired"):
        Access(path=path, clock=lambda: now + 1, models=["other"]).client(["search-key"], "")
    assert Access(path=path, clock=lambda: now, models=["other"]).client(["search-key"], "").id == "search"
    with pytest.raises(Forbidden, match="may not use the model `m`"):
        Access(path=path, clock=lambda: now, models=["m"]).client(["search-key"], "")


def test_a_changed_file_is_in_force_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", SEARCH)
    access = Access(path=path)
    write(path, SEARCH, {"id": "b", "sha256": digest_of("new").hex()})
    access.refresh()
    assert access.client(["new"], "").id == "b"
    path.write_text("{", encoding="utf-8")
    access.refresh()
    path.unlink()
    access.refresh()
    assert access.client(["new"], "").id == "b"
    write(path, SEARCH)
    access.refresh()
    with pytest.raises(Unauthorized):
        access.client(["new"], "")


def test_with_an_empty_file_every_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unauthorized):
        Access(path=write(tmp_path / "keys.json")).client(["search-key"], "")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (SEARCH | {"sha256": "abc"}, "sha256"),
        (SEARCH | {"id": "a b"}, "id"),
        (SEARCH | {"budgets": 3}, "budgets"),
        (SEARCH | {"weight": 0}, "weight"),
        (SEARCH | {"models": []}, "models"),
        ({"id": "twin", "sha256": SEARCH["sha256"].upper()}, "same `sha256`"),
        (SEARCH | {"sha256": digest_of("x").hex()}, "same `id`"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_digest(entry: dict[str, object], words: str) -> None:
    with pytest.raises(SetupError, match=words) as raised:
        parse_keys(json.dumps({"keys": [SEARCH, entry]}), "keys.json")
    assert SEARCH["sha256"] not in str(raised.value)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--api-keys-file"):
        Access(path=tmp_path / "absent")


def test_both_headers_carry_keys() -> None:
    assert credentials_of(["Bearer  a", "bearer b"], [" c "]) == ["a", "b", "c"]
    assert credentials_of(["Basic a"], []) == ["Basic a"]


def test_a_client_that_was_not_looked_for_is_no_admin() -> None:
    assert not Client().is_admin
    with pytest.raises(KeyError):
        client_of(make_mocked_request("GET", "/livez"))
