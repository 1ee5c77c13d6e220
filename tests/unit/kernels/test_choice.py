"""What computes when this or that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.choice import KernelOptions, instruction_sets
from pdserve.base.errors import SetupError
from pdserve.model.loader import load_decoder
from tests.unit.kernels.cpu_ops import needs_kernels
from tests.unit.model.tiny import save_model


@needs_kernels
def test_the_best_instruction_set_is_taken(tmp_path: Path) -> None:
    choice = load_decoder(save_model(tmp_path)).kernels
    assert (choice.implementation, choice.instruction_set, choice.reason) == ("cpu", instruction_sets()[0], "")


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"instruction_set": "portable"}])
def test_what_only_the_kernels_can_do_is_not_dropped_without_them(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(SetupError, match=r"(int8|portable) needs the C\+\+ kernels: plain torch was asked for"):
        load_decoder(save_model(tmp_path), kernels=KernelOptions(implementation="reference", **options))


@needs_kernels
def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"does not run the instruction set 'mmx'; it runs .*portable"):
        load_decoder(save_model(tmp_path), kernels=KernelOptions(instruction_set="mmx"))
