"""The numerics class of a worker names all that its bits depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.choice import Backend, KernelChoice
from pdserve.worker.load.numerics import NumericsClass

CHOICE = KernelChoice(backend=Backend.CPU, instruction_set="avx2")
CLASS = NumericsClass(
    device="cpu", kernels=CHOICE, kv_dtype="bfloat16", num_ranks=1, version="0.9.0", torch_version="2.4.0"
)


def test_the_class_is_a_short_text() -> None:
    assert str(CLASS) == "cpu/avx2/bfloat16/kv-bfloat16/tp1/pdserve-0.9.0"


def test_torch_counts_only_where_it_computes() -> None:
    assert str(replace(CLASS, torch_version="2.5.0")) == str(CLASS)
    reference = replace(CLASS, kernels=KernelChoice(backend=Backend.REFERENCE))
    assert str(replace(reference, torch_version="2.5.0")) != str(reference)


@pytest.mark.parametrize(
    "other",
    [
        replace(CLASS, device="cuda-9.0"),
        replace(CLASS, kernels=replace(CHOICE, instruction_set="avx512")),
        replace(CLASS, kernels=replace(CHOICE, quantization="int8")),
        replace(CLASS, kernels=replace(CHOICE, mode="fast")),
        replace(CLASS, kv_dtype="float32"),
        replace(CLASS, num_ranks=2),
        replace(CLASS, version="0.9.1"),
    ],
)
def test_whatever_changes_bits_changes_the_class(other: NumericsClass) -> None:
    assert str(other) != str(CLASS)
