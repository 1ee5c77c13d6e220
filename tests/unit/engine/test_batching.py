"""Batches of plans: row order, reuse of buffers, and batches made ahead."""

from __future__ import annotations

from array import array
from dataclasses import replace

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.batching import BatchBuilder
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import PrefillChunk, StepPlan
from pdserve.model.batch import TENSORS
from tests.unit.engine.fakes import KEY, limits, row

PARAMS = SamplingParams()


def sequence(tokens: list[int], table: list[int], num_computed: int = 0) -> Sequence:
    made = Sequence.from_prompt(RequestId("r"), tokens, PARAMS, hash_key=KEY)
    made.block_table = array("q", table)
    made.num_computed = num_computed
    return made


def decoding(tokens: list[int], table: list[int]) -> Sequence:
    made = sequence(tokens, table, len(tokens) - 1)
    made.sampling = limits().sample_row(made, 0)
    return made


def test_rows_of_decoding_sequences_come_before_those_of_chunks() -> None:
    prefill = sequence([10, 11, 12, 13, 14, 15], [7, 3, 9])
    plan = StepPlan(
        decoding=(decoding([20, 21, 22, 23, 24], [2, 5]),),
        chunks=(
            PrefillChunk(sequence=prefill, start=0, stop=3),
            PrefillChunk(sequence=prefill, start=3, stop=6, samples=(row(PARAMS), row(PARAMS, choice=1))),
        ),
    )
    batch = BatchBuilder(4).build(plan)
    assert batch.token_ids.tolist() == [24, 10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [20, 28, 29, 30, 31, 12, 13]
    assert batch.query_starts.tolist() == [0, 1, 4, 7]
    assert batch.context_lens.tolist() == [5, 3, 6]
    assert batch.block_tables.tolist() == [[2, 5], [7, 0], [7, 3]]
    assert batch.logits_rows.tolist() == [0, 6]
    rows, logits_rows = plan.sample_rows()
    assert logits_rows == [0, 1, 1]
    assert [sample.choice_index for sample in rows] == [0, 0, 1]


def test_a_batch_without_samples_requests_no_logits() -> None:
    plan = StepPlan(chunks=(PrefillChunk(sequence=sequence([1, 2], [0]), start=0, stop=1),))
    assert BatchBuilder(4).build(plan).logits_rows.tolist() == []
    assert plan.sample_rows() == ([], [])


def test_a_batch_holds_no_views_of_a_sequences_arrays() -> None:
    builder, one = BatchBuilder(2), decoding([1, 2, 3], [0, 1])
    builder.build(StepPlan(decoding=(one,)))
    builder.build(StepPlan(chunks=(PrefillChunk(sequence=one, start=0, stop=3),)))
    one.tokens.append(4)  # Raises BufferError while there is a view of the array.
    one.block_table.append(2)


def test_blocks_beyond_the_context_are_not_in_the_batch() -> None:
    plan = StepPlan(chunks=(PrefillChunk(sequence=sequence([1, 2, 3], [4, 5, 6]), start=0, stop=2),))
    assert BatchBuilder(2).build(plan).block_tables.tolist() == [[4]]


def advance(one: Sequence) -> None:
    one.num_computed += 1
    one.tokens.append(50 + one.num_computed)


def test_steps_of_the_same_sequences_reuse_memory_and_equal_new_batches() -> None:
    builder = BatchBuilder(4)
    a, b = decoding([1, 2, 3], [6]), decoding([4, 5, 6, 7, 8], [2, 5])
    plan = StepPlan(decoding=(a, b))
    first = builder.build(plan)
    for _ in range(6):
        advance(a)
        advance(b)
        for one in (a, b):
            if len(one.block_table) * 4 < one.num_tokens:
                one.block_table.append(10 + one.num_tokens)
        batch, fresh = builder.build(plan), BatchBuilder(4).build(plan)
        assert batch.positions.data_ptr() == first.positions.data_ptr()
        for name in TENSORS:
            assert getattr(batch, name).tolist() == getattr(fresh, name).tolist(), name


def test_a_replaced_block_table_is_read_again() -> None:
    builder, one = BatchBuilder(4), decoding([1, 2, 3], [6])
    assert builder.build(StepPlan(decoding=(one,))).slot_mapping.tolist() == [26]
    one.block_table = array("q", [8])  # As after copy-on-write.
    assert builder.build(StepPlan(decoding=(one,))).slot_mapping.tolist() == [34]


def test_rows_follow_sequences_that_arrive_and_leave() -> None:
    builder = BatchBuilder(4)
    a, b, c = decoding([1, 2, 3], [6]), decoding([4, 5], [2]), decoding([7], [9])
    builder.build(StepPlan(decoding=(a, b)))
    batch = builder.build(StepPlan(decoding=(b, c)))
    assert batch.block_tables.tolist() == [[2], [9]]
    assert batch.token_ids.tolist() == [5, 7]
    assert batch.slot_mapping.tolist() == [9, 36]


def test_buffers_grow_for_a_larger_batch() -> None:
    builder, tokens = BatchBuilder(4), list(range(3000))
    small = builder.build(StepPlan(decoding=(decoding([1], [3]),)))
    assert small.token_ids.tolist() == [1]
    long = sequence(tokens, list(range(750)))
    batch = builder.build(StepPlan(chunks=(PrefillChunk(sequence=long, start=5, stop=3000),)))
    assert batch.token_ids.tolist() == tokens[5:]
    assert batch.positions.tolist() == tokens[5:]
    assert batch.slot_mapping.tolist() == tokens[5:]


def test_a_batch_made_ahead_is_the_next_one_except_for_its_tokens() -> None:
    builder = BatchBuilder(4)
    a, b = decoding([1, 2, 3], [6, 7]), decoding([4, 5, 6, 7, 8], [2, 5])
    plan = StepPlan(decoding=(a, b))
    for builds_before in (True, False):
        if builds_before:
            builder.build(plan)
        ahead = builder.build(replace(plan, is_ahead=True))
        advance(a)
        advance(b)
        fresh = BatchBuilder(4).build(plan)
        for name in set(TENSORS) - {"token_ids"}:
            assert getattr(ahead, name).tolist() == getattr(fresh, name).tolist(), name
        # The same step planned after the previous one was collected: the same batch, with its tokens.
        assert builder.build(plan).token_ids.tolist() == fresh.token_ids.tolist()
        assert builder.build(plan).positions.tolist() == fresh.positions.tolist()
        builder = BatchBuilder(4)
