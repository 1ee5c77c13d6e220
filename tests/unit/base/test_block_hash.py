"""Block hashes are chained, keyed and the same in every process."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.block_hash import hash_blocks, hash_key

KEY = hash_key(model="m", dtype="float32", block_size=4)
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens_lists)
def test_only_full_blocks_are_hashed(tokens: list[int]) -> None:
    assert len(hash_blocks(KEY, tokens, 4)) == len(tokens) // 4


@given(tokens_lists, st.data())
def test_continuing_from_known_hashes_gives_the_same(tokens: list[int], data: st.DataObject) -> None:
    whole = hash_blocks(KEY, tokens, 4)
    cut = data.draw(st.integers(0, len(whole)))
    assert hash_blocks(KEY, tokens, 4, whole[:cut]) == whole


@given(st.lists(st.integers(0, 100), min_size=8, max_size=40), st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones(tokens: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:index], tokens[index] + 1, *tokens[index + 1 :]]
    before, after = hash_blocks(KEY, tokens, 4), hash_blocks(KEY, changed, 4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < index // 4 for i in range(len(before))]


def test_a_salt_isolates_tenants_and_fields_do_not_run_together() -> None:
    keys = {
        hash_key(model="ab", dtype="c", block_size=4),
        hash_key(model="a", dtype="bc", block_size=4),
        hash_key(model="ab", dtype="c", block_size=8),
        hash_key(model="ab", dtype="c", block_size=4, salt=b"tenant"),
    }
    assert len(keys) == 4


def test_hashes_are_of_a_cryptographic_function_under_the_key_of_their_tenant() -> None:
    """CVE-2025-25183: with Python's `hash`, others could make a prompt of the same hashes. Fails for any other hash."""
    tokens, parent = [1, 2, 3, 4, 5, 6, 7, 2**32 - 1], bytes(16)
    for start, found in zip((0, 4), hash_blocks(KEY, tokens, 4), strict=True):
        body = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 4])
        parent = hashlib.blake2b(parent + body, key=KEY, digest_size=16).digest()
        assert found == parent


def test_another_process_computes_the_same_hash() -> None:
    code = (
        "from pdserve.base.block_hash import *;"
        "print(hash_blocks(hash_key(model='m', dtype='float32', block_size=4), [1, 2, 3, 4], 4)[0].hex())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == hash_blocks(KEY, [1, 2, 3, 4], 4)[0].hex()
