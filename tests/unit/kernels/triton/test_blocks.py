"""Packing and unpacking on the GPU against the reference: every byte, the bytes around the target, and the digests."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices import DEVICE

pytest.importorskip("triton")

from kernels.reference import blocks as reference
from kernels.triton import blocks
from tests.unit.kernels.combinations import combinations

KEY = bytes(range(100, 116))
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Range = tuple[int, int]
Layout = tuple[tuple[int, ...], torch.dtype, Range, Range]


def _random_bytes(*size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, size, generator=torch.Generator().manual_seed(seed)).byte().to(DEVICE)


def _cache(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, including NaN."""
    return _random_bytes(*shape[:-1], shape[-1] * dtype.itemsize, seed=seed).view(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


LAYOUTS: list[Layout] = [
    # Cache shape (blocks, layers, K and V, heads, block size, head dim); dtype; packed layers and heads.
    ((9, 3, 2, 4, 8, 40), torch.bfloat16, (0, 3), (0, 4)),
    ((9, 3, 2, 4, 8, 40), torch.bfloat16, (1, 2), (0, 4)),
    ((9, 3, 2, 4, 8, 40), torch.float16, (1, 3), (2, 4)),
    ((5, 4, 2, 3, 4, 20), torch.float32, (0, 4), (1, 2)),
    ((5, 2, 2, 5, 1, 8), torch.uint8, (0, 1), (4, 5)),
    ((6, 2, 2, 3, 16, 80), torch.float8_e4m3fn, (0, 2), (0, 2)),
    ((3, 2, 2, 4, 8, 128), torch.bfloat16, (0, 2), (0, 4)),
    ((4, 1, 2, 1, 3, 24), torch.float16, (0, 1), (0, 1)),
]


@pytest.mark.parametrize(("layout", "ids"), combinations(LAYOUTS, [[1, 1, 2, 0, 1], [2, 0], [2]]))
def test_packing_and_unpacking_match_the_reference(layout: Layout, ids: list[int]) -> None:
    shape, dtype, layers, heads = layout
    cache = _cache(shape, dtype)
    before = cache.clone()
    block_ids = torch.tensor(ids, device=DEVICE)
    size = reference.SliceLayout.of(cache, layers, heads).packed_bytes
    keys = blocks.digest_keys(KEY, size, DEVICE)
    assert torch.equal(keys, reference.digest_keys(KEY, size, DEVICE))
    # Filled, with a margin: shows bytes that are not written, or are written beyond the end.
    margin = torch.full((len(ids) + 1, size), 0xA5, dtype=torch.uint8, device=DEVICE)
    packed = margin[: len(ids)]
    expected = torch.empty_like(packed)
    expected_digests = reference.pack(cache, block_ids, expected, keys, layers=layers, heads=heads)

    digests = blocks.pack(cache, block_ids, packed, keys, layers=layers, heads=heads)

    assert torch.equal(packed, expected)
    assert (margin[len(ids)] == 0xA5).all()
    assert torch.equal(_bits(cache), _bits(before))
    assert torch.equal(digests, expected_digests)

    # Into other, distinct blocks: everything else stays unchanged.
    targets = torch.arange(len(ids), device=DEVICE).flip(0)
    if len(ids) > shape[0]:
        return
    other = _cache(shape, dtype, seed=1)
    expected_cache = other.clone()
    reference.unpack(packed, expected_cache, targets, keys, layers=layers, heads=heads)
    assert torch.equal(blocks.unpack(packed, other, targets, keys, layers=layers, heads=heads), digests)
    assert torch.equal(_bits(other), _bits(expected_cache))
    untouched = _bits(other).clone()
    fresh = _bits(_cache(shape, dtype, seed=1))
    area = untouched[targets, layers[0] : layers[1], :, heads[0] : heads[1]]
    assert torch.equal(area, _bits(cache)[block_ids, layers[0] : layers[1], :, heads[0] : heads[1]])
    untouched[targets, layers[0] : layers[1], :, heads[0] : heads[1]] = 0
    fresh[targets, layers[0] : layers[1], :, heads[0] : heads[1]] = 0
    assert torch.equal(untouched, fresh)


@pytest.mark.parametrize(("layout", "ids"), combinations(LAYOUTS, [[2, 0, 1], [1, 1]]))
def test_blocks_are_gathered_from_another_cache_with_the_digests_of_packing(layout: Layout, ids: list[int]) -> None:
    shape, dtype, layers, _ = layout
    heads = (0, shape[3])
    source, target = _cache((shape[0] + 2, *shape[1:]), dtype), _cache(shape, dtype, seed=1)
    before, sources, targets = source.clone(), torch.tensor(ids, device=DEVICE), torch.arange(len(ids), device=DEVICE)
    size = reference.SliceLayout.of(target, layers, heads).packed_bytes
    keys = blocks.digest_keys(KEY, size, DEVICE)
    packed = torch.empty(len(ids), size, dtype=torch.uint8, device=DEVICE)
    expected, digests = target.clone(), reference.pack(source, sources, packed, keys, layers=layers, heads=heads)
    reference.unpack(packed, expected, targets, keys, layers=layers, heads=heads)
    # Filled, with a margin: shows sums that are not written, or are written beyond the end.
    margin = torch.full((blocks.num_sums(target, len(ids), layers) + 1,), -7, device=DEVICE)
    here = blocks.Blocks(source, sources)
    slices = reference.SliceLayout.of(source, layers, heads)
    words = sources * slices.block_words + slices.first_word
    memory = source.view(-1).view(torch.uint8)

    blocks.gather(blocks.Slices(memory, words), blocks.Blocks(target, targets), keys, margin[:-1], layers=layers)

    assert margin[-1] == -7
    first_keys = reference.digest_keys(KEY, 0, torch.device("cpu"))
    assert torch.equal(blocks.digests_of_sums(margin[:-1].cpu(), len(ids), first_keys, size), digests.cpu())
    assert torch.equal(_bits(target), _bits(expected))
    assert torch.equal(_bits(source), _bits(before))
    gathered = margin.clone()
    margin[:-1] = 0
    blocks.digest(here, keys, margin[:-1], layers=layers)
    assert torch.equal(margin, gathered)
    assert torch.equal(_bits(source), _bits(before))


@pytest.mark.parametrize(("layout", "ids"), combinations(LAYOUTS, [[2, 0, 1], [1, 1]]))
def test_blocks_are_gathered_from_where_they_were_scattered(layout: Layout, ids: list[int]) -> None:
    shape, dtype, layers, _ = layout
    heads = (0, shape[3])
    source, block_ids = _cache(shape, dtype), torch.tensor(ids, device=DEVICE)
    size = reference.SliceLayout.of(source, layers, heads).packed_bytes
    keys = blocks.digest_keys(KEY, size, DEVICE)
    packed = torch.empty(len(ids), size, dtype=torch.uint8, device=DEVICE)
    digests = reference.pack(source, block_ids, packed, keys, layers=layers, heads=heads)
    # Apart and in another order, in memory that shows what else is written.
    starts = [(len(ids) - index) * (size + 32) for index in range(len(ids))]
    memory = torch.full(((len(ids) + 2) * (size + 32),), 0xA5, dtype=torch.uint8, device=DEVICE)
    there = blocks.Slices(memory, torch.tensor(starts, device=DEVICE) // 8)
    expected = memory.clone()
    for start, row in zip(starts, packed, strict=True):
        expected[start : start + size] = row
    sums = torch.full((blocks.num_sums(source, len(ids), layers),), -7, device=DEVICE)
    before = source.clone()

    blocks.scatter(blocks.Blocks(source, block_ids), there, keys, sums, layers=layers)

    first_keys = reference.digest_keys(KEY, 0, torch.device("cpu"))
    assert torch.equal(memory, expected)
    assert torch.equal(_bits(source), _bits(before))
    assert torch.equal(blocks.digests_of_sums(sums.cpu(), len(ids), first_keys, size), digests.cpu())

    target, targets, gathered = torch.zeros_like(source), torch.arange(len(ids), device=DEVICE), torch.zeros_like(sums)
    blocks.gather(there, blocks.Blocks(target, targets), keys, gathered, layers=layers)
    assert torch.equal(gathered, sums)
    area = slice(*layers)
    assert torch.equal(_bits(target)[targets][:, area], _bits(source)[block_ids][:, area])
    assert torch.equal(memory, expected)


def test_no_blocks_give_no_digests() -> None:
    cache = _cache((2, 1, 2, 1, 4, 8), torch.bfloat16)
    keys = blocks.digest_keys(KEY, cache[0].nbytes, DEVICE)
    empty = torch.empty(0, cache[0].nbytes, dtype=torch.uint8, device=DEVICE)
    ids = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert blocks.pack(cache, ids, empty, keys, layers=(0, 1), heads=(0, 1)).shape == (0, 16)
    assert blocks.unpack(empty, cache, ids, keys, layers=(0, 1), heads=(0, 1)).shape == (0, 16)


def test_results_do_not_depend_on_how_the_work_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = _cache((2, 3, 2, 2, 8, 20), torch.bfloat16)
    ids = torch.tensor([1, 0], device=DEVICE)
    packed = torch.empty(2, cache[0].nbytes, dtype=torch.uint8, device=DEVICE)
    keys = blocks.digest_keys(KEY, cache[0].nbytes, DEVICE)
    expected = reference.digest(cache[ids].view(2, -1).view(torch.uint8), keys)
    for enough, tile_words in ((1024, 512), (0, 512), (0, 32), (1024, 64)):
        monkeypatch.setattr(blocks, "_ENOUGH_PROGRAMS", enough)
        monkeypatch.setattr(blocks, "_TILE_WORDS", tile_words)
        assert torch.equal(blocks.pack(cache, ids, packed, keys, layers=(0, 3), heads=(0, 2)), expected)


def test_a_flipped_bit_anywhere_changes_the_digest_when_it_is_unpacked() -> None:
    cache = _cache((2, 2, 2, 2, 16, 64), torch.bfloat16)
    ids = torch.tensor([1], device=DEVICE)
    packed = torch.empty(1, cache[0].nbytes, dtype=torch.uint8, device=DEVICE)
    keys = blocks.digest_keys(KEY, cache[0].nbytes, DEVICE)
    sent = blocks.pack(cache, ids, packed, keys, layers=(0, 2), heads=(0, 2))
    for index in (0, 7, 4095, 4096, 8191, packed.shape[1] - 1):
        packed[0, index] ^= 0x10
        # In all four lanes: each alone would miss one change in four billion.
        got = blocks.unpack(packed, cache, ids, keys, layers=(0, 2), heads=(0, 2))
        assert (got.view(torch.int32) != sent.view(torch.int32)).all()
        packed[0, index] ^= 0x10
    assert torch.equal(blocks.unpack(packed, cache, ids, keys, layers=(0, 2), heads=(0, 2)), sent)


@pytest.mark.parametrize("key", [bytes(16), b"\xff" * 16, b"\x00" * 7 + b"\x80" + b"\x01" + b"\x00" * 7])
def test_keys_of_any_sign_are_stretched_as_in_the_reference(key: bytes) -> None:
    assert torch.equal(blocks.digest_keys(key, 40, DEVICE), reference.digest_keys(key, 40, DEVICE))


def test_keys_for_whole_blocks_also_fit_slices() -> None:
    cache = _cache((2, 2, 2, 2, 4, 16), torch.bfloat16)
    ids = torch.tensor([0, 1], device=DEVICE)
    long, short = (blocks.digest_keys(KEY, size, DEVICE) for size in (cache[0].nbytes, cache[0, 0].nbytes))
    packed = torch.empty(2, cache[0, 0].nbytes, dtype=torch.uint8, device=DEVICE)
    digests = [blocks.pack(cache, ids, packed, keys, layers=(1, 2), heads=(0, 2)) for keys in (long, short)]
    assert torch.equal(*digests)


def test_halves_of_heads_from_two_peers_make_a_whole() -> None:
    whole = _cache((3, 2, 2, 4, 8, 32), torch.bfloat16)
    target = torch.zeros_like(whole)
    ids = torch.tensor([2, 0], device=DEVICE)
    keys = blocks.digest_keys(KEY, whole[0].nbytes, DEVICE)
    for heads in ((0, 2), (2, 4)):
        peer = whole[:, :, :, heads[0] : heads[1]].contiguous()
        packed = torch.empty(2, peer[0].nbytes, dtype=torch.uint8, device=DEVICE)
        sent = blocks.pack(peer, ids, packed, keys, layers=(0, 2), heads=(0, 2))
        assert torch.equal(blocks.unpack(packed, target, ids, keys, layers=(0, 2), heads=heads), sent)
    assert torch.equal(_bits(target[ids]), _bits(whole[ids]))
    assert not _bits(target[1]).any()
