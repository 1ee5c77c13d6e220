from __future__ import annotations

from array import array

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.batching import build_batch, logits_rows_of
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, StepPlan
from tests.unit.engine.fakes import CPU, KEY, row

PARAMS = SamplingParams()


def sequence(tokens: list[int], table: list[int]) -> Sequence:
    made = Sequence.from_prompt(RequestId("r"), tokens, PARAMS, hash_key=KEY)
    made.block_table = array("q", table)
    return made


def test_chunks_become_rows_one_sequence_after_the_other() -> None:
    prefill = sequence([10, 11, 12, 13, 14, 15], [7, 3, 9])
    decoding = sequence([20, 21, 22, 23, 24], [2, 5])
    plan = StepPlan(
        chunks=(
            Chunk(sequence=prefill, start=0, stop=3),
            Chunk(sequence=decoding, start=4, stop=5, samples=(row(PARAMS),)),
            Chunk(sequence=prefill, start=3, stop=6, samples=(row(PARAMS), row(PARAMS, choice=1))),
        )
    )
    batch = build_batch(plan, 4, CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 24, 13, 14, 15]
    assert batch.positions.tolist() == [0, 1, 2, 4, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 20, 31, 12, 13]
    assert batch.query_starts.tolist() == [0, 3, 4, 7]
    assert batch.context_lens.tolist() == [3, 5, 6]
    assert batch.block_tables.tolist() == [[7, 0], [2, 5], [7, 3]]
    assert batch.logits_rows.tolist() == [3, 6]
    assert logits_rows_of(plan) == [0, 1, 1]


def test_one_token_each_is_a_decode_step() -> None:
    chunks = tuple(
        Chunk(sequence=sequence([1, 2, number], [number]), start=2, stop=3, samples=(row(PARAMS),))
        for number in (4, 5, 6)
    )
    batch = build_batch(StepPlan(chunks=chunks), 4, CPU)
    assert batch.token_ids.tolist() == [4, 5, 6]
    assert batch.slot_mapping.tolist() == [18, 22, 26]
    assert batch.logits_rows.tolist() == [0, 1, 2]


def test_a_batch_without_samples_wants_no_logits() -> None:
    plan = StepPlan(chunks=(Chunk(sequence=sequence([1, 2], [0]), start=0, stop=1),))
    assert build_batch(plan, 4, CPU).logits_rows.tolist() == []
    assert logits_rows_of(plan) == []


def test_a_batch_keeps_no_hold_on_the_arrays_of_a_sequence() -> None:
    one = sequence([1, 2, 3], [0, 1])
    batches = [build_batch(StepPlan(chunks=(Chunk(sequence=one, start=start, stop=3),)), 2, CPU) for start in (0, 2)]
    one.tokens.append(4)  # raises BufferError while a tensor views the array
    one.block_table.append(2)
    assert [batch.token_ids.tolist() for batch in batches] == [[1, 2, 3], [3]]


def test_room_beyond_the_context_is_not_in_the_table() -> None:
    plan = StepPlan(chunks=(Chunk(sequence=sequence([1, 2, 3], [4, 5, 6]), start=0, stop=2),))
    assert build_batch(plan, 2, CPU).block_tables.tolist() == [[4]]
