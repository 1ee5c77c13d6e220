"""Batches on a device equal those of the host, and padding rows have no effect."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.engine.device_batch import BatchShape, DeviceBatches
from pdserve.model.batch import TENSORS, Batch
from tests.support.devices import DEVICE


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def mixed() -> Batch:
    """A decoding sequence and a chunk of three rows."""
    return Batch(
        token_ids=numbers(9, 1, 2, 3),
        positions=numbers(20, 4, 5, 6),
        slot_mapping=numbers(100, 52, 53, 54),
        query_starts=numbers(0, 1, 4),
        context_lens=numbers(21, 7),
        block_tables=torch.tensor([[5, 6], [3, 0]]),
        logits_rows=numbers(0, 3),
    )


def decoding(count: int, num_blocks: int = 3) -> Batch:
    return Batch(
        token_ids=torch.arange(count) + 7,
        positions=torch.arange(count) + 30,
        slot_mapping=torch.arange(count) * 16,
        query_starts=torch.arange(count + 1),
        context_lens=torch.arange(count) + 31,
        block_tables=torch.arange(count * num_blocks).view(count, num_blocks) + 1,
        logits_rows=torch.arange(count),
    )


def test_a_batch_is_the_same_on_the_device() -> None:
    there = DeviceBatches(DEVICE).upload(mixed())
    for name in TENSORS:
        assert getattr(there, name).cpu().equal(getattr(mixed(), name)), name


def test_what_is_requested_of_a_batch_is_known_on_the_device() -> None:
    batches = DeviceBatches(DEVICE)
    assert [batches.upload(replace(mixed(), hidden_only=wanted)).hidden_only for wanted in (True, False)] == [
        True,
        False,
    ]


def test_all_fields_are_aligned_for_kernels() -> None:
    there = DeviceBatches(DEVICE).upload(mixed())
    assert all(getattr(there, name).data_ptr() % 16 == 0 for name in TENSORS)


def test_padding_rows_write_nothing_and_have_an_empty_context() -> None:
    shape = BatchShape(num_tokens=8, num_sequences=8, num_blocks=4, num_logits=8)
    batches = DeviceBatches(DEVICE)
    batches.upload(decoding(8, num_blocks=4), shape)  # Its remains must not show.
    there = batches.upload(decoding(3), shape)
    assert there.token_ids.tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert there.slot_mapping.tolist() == [0, 16, 32, -1, -1, -1, -1, -1]
    assert there.context_lens.tolist() == [31, 32, 33, 0, 0, 0, 0, 0]
    assert there.query_starts.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert there.logits_rows.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert there.block_tables.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 0], *[[0] * 4] * 5]


def test_memory_whose_address_graphs_contain_never_grows() -> None:
    shape = BatchShape.of(decoding(3))
    batches = DeviceBatches(DEVICE, shape.num_elements)
    address = batches.upload(decoding(3)).token_ids.data_ptr()
    assert batches.upload(decoding(2)).token_ids.data_ptr() == address
    with pytest.raises(AssertionError, match="graphs contain the address"):
        batches.upload(decoding(4))


@pytest.mark.parametrize("batch", [decoding(1), decoding(8)])
def test_only_decoding_sequences_are_decode_only(batch: Batch) -> None:
    assert BatchShape.of(batch).is_decode_only
    assert not BatchShape.of(mixed()).is_decode_only


def test_the_address_stays_as_long_as_batches_fit() -> None:
    shape = BatchShape.of(decoding(8))
    batches = DeviceBatches(DEVICE, shape.num_elements)
    addresses = {batches.upload(decoding(count)).token_ids.data_ptr() for count in (8, 1, 5, 8)}
    assert len(addresses) == 1


def test_token_ids_on_the_device_replace_the_batchs_and_failed_ones_become_0() -> None:
    shape = BatchShape(num_tokens=8, num_sequences=8, num_blocks=4, num_logits=8)
    sampled = numbers(41, -1, 43).to(DEVICE)
    there = DeviceBatches(DEVICE).upload(decoding(3), shape, sampled)
    assert there.token_ids.tolist() == [41, 0, 43, 0, 0, 0, 0, 0]
    assert there.positions.tolist()[:3] == [30, 31, 32]
    assert sampled.tolist() == [41, -1, 43]
