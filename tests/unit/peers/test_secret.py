"""The cluster secret: where it is read, what a MAC covers, and that no message shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.peers.secret import MAC_BYTES, SECRET_VARIABLE, new_secret, parse_secret, read_secret

OLD, NEW = "an-old-secret-of-the-cluster", "a-new-secret-of-the-cluster"


def test_a_mac_is_for_one_purpose_and_exactly_these_fields() -> None:
    secret = parse_secret(NEW, where="test")
    mac = secret.mac("commit", b"ab", b"c")
    assert len(mac) == MAC_BYTES
    assert secret.matches(mac, "commit", b"ab", b"c")
    for purpose, fields in [
        ("ticket", (b"ab", b"c")),
        # Without the lengths these would be the same bytes.
        ("commit", (b"a", b"bc")),
        ("commit", (b"abc",)),
        ("commit", (b"ab", b"c", b"")),
    ]:
        assert not secret.matches(mac, purpose, *fields)
    assert not parse_secret(OLD, where="test").matches(mac, "commit", b"ab", b"c")


def test_a_secret_is_replaced_while_both_are_accepted() -> None:
    """The three states of a rolling change, each beside the one before."""
    old, both, new = (parse_secret(text, where="test") for text in (OLD, f"{NEW}\n{OLD}\n", NEW))
    assert both.matches(old.mac("x", b"y"), "x", b"y")
    assert new.matches(both.mac("x", b"y"), "x", b"y")
    assert not new.matches(old.mac("x", b"y"), "x", b"y")


def test_a_cluster_gets_its_first_secret_while_it_serves() -> None:
    ready, both, closed = (parse_secret(text, where="test") for text in (f"open {NEW}", f"{NEW} open", NEW))
    assert (ready.signs, ready.accepts_open) == (False, True)
    assert (both.signs, both.accepts_open) == (True, True)
    assert (closed.signs, closed.accepts_open) == (True, False)


def test_the_file_wins_over_the_variable_and_without_both_the_cluster_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert read_secret(None) is None
    monkeypatch.setenv(SECRET_VARIABLE, "")
    assert read_secret(None) is None
    monkeypatch.setenv(SECRET_VARIABLE, OLD)
    assert read_secret(None) == parse_secret(OLD, where="test")
    file = tmp_path / "secret"
    file.write_text(f"{NEW}\n")
    assert read_secret(str(file)) == parse_secret(NEW, where="test")


@pytest.mark.parametrize("text", ["", "\n", "open", "too-short", "x" * 2000, f"{NEW} short", " ".join([NEW] * 9)])
def test_an_unusable_secret_is_refused_without_being_shown(text: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(SetupError, match="--cluster-secret-file") as refused:
        read_secret(str(file))
    assert not any(word in str(refused.value) for word in (NEW, "too-short", "x" * 20))


def test_a_missing_file_is_no_open_cluster(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="Cannot read the cluster secret"):
        read_secret(str(tmp_path / "absent"))


def test_a_secret_is_not_printed_and_each_new_one_differs() -> None:
    secret = parse_secret(NEW, where="test")
    assert NEW not in repr(secret)
    assert new_secret() != new_secret()
    parse_secret(new_secret(), where="test")
