"""The digest of packed blocks in plain torch: its random generator, and the inputs it depends on."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.blocks import HEADER_PAIRS, LANES, SliceLayout, digest, digest_keys, philox

KEY = bytes(range(16))
CPU = torch.device("cpu")


def _packed(num_blocks: int, num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_blocks, num_bytes), generator=torch.Generator().manual_seed(seed)).byte()


@pytest.mark.parametrize(
    ("key", "index", "words"),
    [
        ("00" * 16, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ("ff" * 16, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_the_generator_gives_the_published_words(key: str, index: int, words: tuple[int, ...]) -> None:
    # As signed: counter ff...ff has its lower half in the index.
    found = philox(bytes.fromhex(key), torch.tensor([index]))[0]
    assert tuple(found.tolist()) == words


def test_the_published_words_of_digits_of_pi() -> None:
    key = b"".join(word.to_bytes(4, "little") for word in (0xA4093822, 0x299F31D0, 0x13198A2E, 0x03707344))
    words = philox(key, torch.tensor([0x85A308D3_243F6A88 - (1 << 64)]))[0]
    assert tuple(words.tolist()) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_a_lane_is_the_documented_sum() -> None:
    packed = _packed(1, 40)
    keys = digest_keys(KEY, 40, CPU)
    table = [(pair & 0xFFFFFFFF, pair >> 32 & 0xFFFFFFFF) for pair in keys.tolist()]
    pairs = [(word & 0xFFFFFFFF, word >> 32 & 0xFFFFFFFF) for word in packed.view(torch.int64)[0].tolist()]
    expected = b""
    for lane in range(LANES):
        total = 40
        for at, (low, high) in enumerate(pairs):
            left, right = table[HEADER_PAIRS + at + lane]
            total += (low + left) % 2**32 * ((high + right) % 2**32)
        total %= 2**64
        constant, of_low, of_high = (keys[3 * lane + at].item() for at in range(3))
        mixed = (constant + of_low * (total & 0xFFFFFFFF) + of_high * (total >> 32)) % 2**64
        expected += (mixed >> 32).to_bytes(4, "little")
    assert bytes(digest(packed, keys)[0].tolist()) == expected


def test_a_digest_depends_on_bytes_and_key_not_on_the_row() -> None:
    packed = _packed(3, 256)
    keys = digest_keys(KEY, 1024, CPU)
    digests = digest(packed, keys)
    assert torch.equal(digest(packed[1:2], digest_keys(KEY, 256, CPU)), digests[1:2])
    assert torch.equal(digest(packed.flip(0), keys), digests.flip(0))
    assert len({bytes(row.tolist()) for row in digests}) == 3
    for at in range(16):
        other = bytes(byte ^ (at == index) for index, byte in enumerate(KEY))
        assert not (digest(packed, digest_keys(other, 256, CPU)) == digests).all(1).any()


def test_every_flipped_bit_changes_all_lanes() -> None:
    packed = _packed(1, 64)
    keys = digest_keys(KEY, 64, CPU)
    lanes = digest(packed, keys).view(torch.int32)
    flipped = packed.repeat(512, 1)
    for bit in range(512):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    assert (digest(flipped, keys).view(torch.int32) != lanes).all()


@pytest.mark.parametrize("unit", [4, 8, 16, 128])
def test_swapping_adjacent_units_changes_the_digest(unit: int) -> None:
    packed = _packed(1, 512)
    keys = digest_keys(KEY, 512, CPU)
    pairs = packed.view(-1, 2, unit)
    lanes = digest(packed, keys).view(torch.int32)
    for at in range(pairs.shape[0]):
        swapped = pairs.clone()
        swapped[at] = pairs[at].flip(0)
        assert (digest(swapped.view(1, -1), keys).view(torch.int32) != lanes).all()


def test_different_numbers_of_zeros_have_different_digests() -> None:
    keys = digest_keys(KEY, 1024, CPU)
    digests = {bytes(digest(torch.zeros(1, size).byte(), keys)[0].tolist()) for size in range(8, 1024, 8)}
    assert len(digests) == 127


def test_the_stretched_key_does_not_repeat() -> None:
    keys = digest_keys(KEY, 1 << 18, CPU)
    assert len(keys.unique()) == len(keys)
    bits = (keys.unsqueeze(1) >> torch.arange(64)) & 1
    # 32,787 fair coins for each of the 64 bits: six standard deviations are 0.0166.
    assert (bits.double().mean(0) - 0.5).abs().max() < 0.0166
    for shift in (1, 2, 3, 4, 1 << 10, 1 << 14):
        assert ((bits[shift:] ^ bits[:-shift]).double().mean(0) - 0.5).abs().max() < 0.024


def test_whole_blocks_are_one_run_and_head_slices_two_per_layer() -> None:
    cache = torch.zeros(3, 5, 2, 4, 8, 16, dtype=torch.bfloat16)
    whole = SliceLayout.of(cache, (0, 5), (0, 4))
    assert (whole.num_runs, whole.packed_bytes) == (1, cache[0].nbytes)
    some = SliceLayout.of(cache, (1, 3), (2, 3))
    assert (some.num_runs, some.packed_bytes) == (4, cache[0, 1:3, :, 2:3].nbytes)
