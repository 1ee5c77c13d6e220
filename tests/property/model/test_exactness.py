"""Promise 1 at the decoder: a token's logits and KV depend on the tokens before it, and on nothing else.

The reference is a sequence computed alone in one step. Random models with awkward shapes compute the same tokens in
batches, in chunks, step by step, on more threads, in other blocks and with garbage in the cache. Every bit of the
logits and of the stored KV must be equal.

Only `PDSERVE_TEST_DEPTH=full` runs all examples of each property on all instruction sets. Without it, the best one gets
three fifths, sets between that and `portable` 5 and `portable` 10, because all sets share the code above the headers of
`kernels/cpu/src/isa`. That AVX2 and AVX-512 compute the same bits is a test of its own, always with all examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.model.decoder import Decoder
from tests.property.model.plans import Placement, Plan, chunkings, compute, plans, random_text, whole
from tests.property.model.same import assert_close, assert_same_bits
from tests.property.model.tiny_models import Fields, make_decoder, make_truth, model_configs
from tests.support.backends import INSTRUCTION_SETS, REFERENCE, native
from tests.support.depth import examples_on

Test = Callable[..., None]

#: Dtypes of the model, with the quantization of its weights.
_FORMATS: tuple[tuple[torch.dtype, str | None], ...] = (
    (torch.bfloat16, None),
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, "int8"),
)
#: Usually a few blocks; sometimes long enough for several tiles of attention.
_LENGTHS = st.one_of(*[st.integers(1, 70)] * 4, st.integers(120, 400))
_PLACEMENTS = st.builds(Placement, block_size=st.sampled_from([1, 8, 16, 32]), seed=st.integers(0, 1000))
#: Tolerances for rounding of stored and multiplied values, as shares of the largest value.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 2e-3}


@pytest.fixture(scope="module", autouse=True)
def torch_computes_alone() -> Iterator[None]:
    """One thread for torch, which only computes small things here."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and the texts that it computes."""

    fields: Fields
    format: tuple[torch.dtype, str | None]
    lengths: tuple[int, ...]
    placement: Placement
    seed: int

    def decoder(self, instruction_set: str, *, num_threads: int = 1) -> Decoder:
        dtype, quantization = self.format
        options = native(instruction_set, quantization=quantization, num_threads=num_threads)
        return make_decoder(self.fields, options, dtype, seed=self.seed)

    def reference(self) -> Decoder:
        return make_decoder(self.fields, REFERENCE, self.format[0], seed=self.seed)

    def truth(self) -> Decoder:
        return make_truth(self.fields, *self.format, seed=self.seed)

    @property
    def tolerance(self) -> float:
        return _TOLERANCE[self.format[0]]

    def texts(self) -> list[list[int]]:
        vocab_size = self.fields["vocab_size"]
        assert isinstance(vocab_size, int)
        return [random_text(self.seed + number, length, vocab_size) for number, length in enumerate(self.lengths)]


def _settings(
    *,
    max_sequences: int,
    lengths: st.SearchStrategy[int] = _LENGTHS,
    formats: tuple[tuple[torch.dtype, str | None], ...] = _FORMATS,
) -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        model_configs(),
        st.sampled_from(formats),
        st.lists(lengths, min_size=1, max_size=max_sequences).map(tuple),
        _PLACEMENTS,
        st.integers(0, 2**20),
    )


def _for_all(num_examples: int, **strategies: Any) -> Callable[[Test], Test]:
    """Runs a test on every instruction set, with as many examples as the depth allows."""

    def decorate(test: Test) -> Test:
        def run(instruction_set: str) -> None:
            def check(**examples: Any) -> None:
                test(instruction_set, **examples)

            # Hypothesis prints this name with a failing example, and stores the example under it.
            check.__name__ = check.__qualname__ = test.__name__
            settings(max_examples=examples_on(instruction_set, num_examples))(given(**strategies)(check))()

        run.__name__ = run.__qualname__ = test.__name__
        run.__doc__, run.__module__ = test.__doc__, test.__module__
        parametrized: Test = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)(run)
        return parametrized

    return decorate


@_for_all(25, setting=_settings(max_sequences=9), data=st.data())
def test_a_row_alone_is_the_same_row_in_any_batch(instruction_set: str, setting: Setting, data: st.DataObject) -> None:
    decoder, texts = setting.decoder(instruction_set), setting.texts()
    # All prompts in one step, then one row of each sequence per step, in a new order each time.
    tails = [min(4, length - 1) for length in setting.lengths]
    plan: Plan = [[(index, length - tails[index]) for index, length in enumerate(setting.lengths)]]
    for step in range(max(tails)):
        plan.append(data.draw(st.permutations([(index, 1) for index, tail in enumerate(tails) if step < tail])))
    assert_same_bits(compute(decoder, texts, plan, setting.placement), whole(decoder, texts, setting.placement))


@_for_all(25, setting=_settings(max_sequences=1), data=st.data())
def test_any_chunking_of_a_prompt_equals_the_whole_prompt(
    instruction_set: str, setting: Setting, data: st.DataObject
) -> None:
    decoder, texts = setting.decoder(instruction_set), setting.texts()
    plan = [[(0, size)] for size in data.draw(chunkings(len(texts[0])))]
    ours = compute(decoder, texts, plan, setting.placement, every_row=True)
    assert_same_bits(ours, whole(decoder, texts, setting.placement))


@_for_all(15, setting=_settings(max_sequences=1, lengths=st.integers(1, 150)))
def test_decoding_step_by_step_equals_prefilling(instruction_set: str, setting: Setting) -> None:
    decoder, texts = setting.decoder(instruction_set), setting.texts()
    ours = compute(decoder, texts, [[(0, 1)]] * len(texts[0]), setting.placement)
    assert_same_bits(ours, whole(decoder, texts, setting.placement))


@_for_all(20, setting=_settings(max_sequences=6), threads=st.sampled_from([2, 3]), data=st.data())
def test_the_number_of_threads_changes_nothing(
    instruction_set: str, setting: Setting, threads: int, data: st.DataObject
) -> None:
    texts, plan = setting.texts(), data.draw(plans(setting.lengths))
    expected = whole(setting.decoder(instruction_set), texts, setting.placement)
    decoder = setting.decoder(instruction_set, num_threads=threads)
    assert_same_bits(whole(decoder, texts, setting.placement), expected)
    assert_same_bits(compute(decoder, texts, plan, setting.placement), expected)


@_for_all(20, setting=_settings(max_sequences=4), fill=st.sampled_from([math.nan, math.inf, -math.inf, 6e4]))
def test_other_content_of_the_cache_changes_nothing(instruction_set: str, setting: Setting, fill: float) -> None:
    decoder, texts = setting.decoder(instruction_set), setting.texts()
    tails = [min(3, length - 1) for length in setting.lengths]
    plan: Plan = [
        [(index, length - tail) for index, (length, tail) in enumerate(zip(setting.lengths, tails, strict=True))]
    ]
    plan += [[(index, 1)] for index, tail in enumerate(tails) for _ in range(tail)]
    clean, filled = replace(setting.placement, fill=0.0), replace(setting.placement, fill=fill)
    ours = compute(decoder, texts, plan, filled, refill=True)
    assert_same_bits(ours, whole(decoder, texts, clean))


@_for_all(20, setting=_settings(max_sequences=3), other=_PLACEMENTS, spare=st.integers(0, 200))
def test_ids_and_size_of_a_sequences_blocks_change_nothing(
    instruction_set: str, setting: Setting, other: Placement, spare: int
) -> None:
    decoder, texts = setting.decoder(instruction_set), setting.texts()
    elsewhere = replace(other, spare_blocks=spare)
    assert_same_bits(whole(decoder, texts, elsewhere), whole(decoder, texts, setting.placement))


@_for_all(30, setting=_settings(max_sequences=6), data=st.data())
def test_any_interleaving_of_chunks_and_steps_equals_each_sequence_alone(
    instruction_set: str, setting: Setting, data: st.DataObject
) -> None:
    decoder, texts = setting.decoder(instruction_set), setting.texts()
    plan = data.draw(plans(setting.lengths))
    assert_same_bits(compute(decoder, texts, plan, setting.placement), whole(decoder, texts, setting.placement))


@_for_all(25, setting=_settings(max_sequences=2))
def test_results_are_close_to_exact_arithmetic_with_the_stored_weights(instruction_set: str, setting: Setting) -> None:
    texts = setting.texts()
    ours = whole(setting.decoder(instruction_set), texts, setting.placement)
    assert_close(ours, whole(setting.truth(), texts, setting.placement), setting.tolerance)


@pytest.mark.skipif(not {"avx2", "avx512"} <= {*INSTRUCTION_SETS}, reason="this machine does not have both")
@settings(max_examples=25)
@given(setting=_settings(max_sequences=2))
def test_avx2_and_avx512_compute_the_same_bits(setting: Setting) -> None:
    texts = setting.texts()
    ours = whole(setting.decoder("avx2"), texts, setting.placement)
    assert_same_bits(ours, whole(setting.decoder("avx512"), texts, setting.placement))


@settings(max_examples=6)
@given(setting=_settings(max_sequences=4, formats=_FORMATS[:2]), data=st.data())
def test_the_reference_stays_close_to_itself_in_any_interleaving(setting: Setting, data: st.DataObject) -> None:
    decoder, texts, plan = setting.reference(), setting.texts(), data.draw(plans(setting.lengths))
    ours = compute(decoder, texts, plan, setting.placement)
    assert_close(ours, whole(decoder, texts, setting.placement), setting.tolerance)
