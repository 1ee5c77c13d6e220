"""The chosen backend for each request, and the errors of requests that cannot be met."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.choice import Backend, KernelOptions, instruction_sets, why_not_triton
from pdserve.base.errors import SetupError
from pdserve.model.loader import load_decoder
from tests.support.devices import gpu_only, needs_triton
from tests.unit.kernels.cpu_ops import needs_kernels
from tests.unit.model.tiny import Second, save_model

TRITON = KernelOptions(backend=Backend.TRITON)


@needs_kernels
def test_the_best_instruction_set_is_taken(tmp_path: Path) -> None:
    choice = load_decoder(save_model(tmp_path)).kernels
    assert (choice.backend, choice.instruction_set, choice.reason) == ("cpu", instruction_sets()[0], "")


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"instruction_set": "portable"}])
def test_options_for_the_cpp_kernels_are_refused_without_them(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(SetupError, match=r"(int8|portable) needs the C\+\+ kernels: plain torch was requested"):
        load_decoder(save_model(tmp_path), kernels=KernelOptions(backend=Backend.REFERENCE, **options))


FP8 = torch.ones(2, 2, 2)


def test_an_fp8_kv_cache_is_computed_by_plain_torch_on_a_cpu_and_the_reason_is_reported(tmp_path: Path) -> None:
    choice = load_decoder(save_model(tmp_path), kernels=KernelOptions(kv_scales=FP8)).kernels
    expected = "the C++ kernels have no fp8 KV cache (--kv-cache-dtype fp8_e4m3)"
    assert (choice.backend, choice.reason) == ("reference", expected)
    requested = load_decoder(tmp_path, kernels=KernelOptions(backend=Backend.REFERENCE, kv_scales=FP8)).kernels
    assert (requested.backend, requested.reason) == ("reference", "")


@pytest.mark.parametrize(
    ("options", "named"),
    [({"backend": Backend.CPU}, "--kernels cpu"), ({"quantization": "int8"}, "int8"), ({"instruction_set": "x"}, "x")],
)
def test_an_fp8_kv_cache_is_refused_with_options_for_the_cpp_kernels(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    expected = (
        rf"^{named} needs the C\+\+ kernels: .* no fp8 KV cache .* Use either --kv-cache-dtype fp8_e4m3 or {named}\."
    )
    with pytest.raises(SetupError, match=expected):
        load_decoder(save_model(tmp_path), kernels=KernelOptions(kv_scales=FP8, **options))


@needs_triton
def test_an_fp8_kv_cache_is_refused_on_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert "cuda:0 has no fp8" in why_not_triton(device, fp8=True)
    assert why_not_triton(device, fp8=False) == ""
    capability = (8, 9)
    assert why_not_triton(device, fp8=True) == ""


@needs_kernels
def test_an_unknown_instruction_set_is_refused_and_the_available_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"does not run the instruction set 'mmx'; it runs .*portable"):
        load_decoder(save_model(tmp_path), kernels=KernelOptions(instruction_set="mmx"))


@needs_kernels
def test_ranks_are_computed_by_plain_torch_and_the_reason_is_reported(tmp_path: Path) -> None:
    choice = load_decoder(save_model(tmp_path), ranks=Second()).kernels
    assert (choice.backend, choice.reason[:23]) == ("reference", "2 ranks share the model")
    with pytest.raises(SetupError, match=r"--kernels cpu needs the C\+\+ kernels: 2 ranks share the model"):
        load_decoder(tmp_path, kernels=KernelOptions(backend=Backend.CPU), ranks=Second())


@needs_triton
@pytest.mark.parametrize(("deterministic", "mode"), [(True, "deterministic"), (False, "fast")])
def test_triton_runs_in_its_interpreter_if_that_is_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool, mode: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = KernelOptions(backend=Backend.TRITON, deterministic=deterministic)
    choice = load_decoder(save_model(tmp_path), kernels=options).kernels
    assert (choice.backend, choice.instruction_set, choice.reason, choice.mode) == ("triton", "", "", mode)


@needs_triton
def test_triton_is_refused_for_a_model_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SetupError, match=r"the Triton kernels cannot run: the model is on cpu, .*TRITON_INTERPRET=1"):
        load_decoder(save_model(tmp_path), kernels=TRITON)


def test_triton_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SetupError, match=r"Triton is not installed; it comes with pdserve\[cuda12\]"):
        load_decoder(save_model(tmp_path), kernels=TRITON)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"instruction_set": "portable"}])
def test_options_that_triton_does_not_have_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(SetupError, match=r"(int8|portable) needs the C\+\+ kernels: --kernels triton was requested"):
        load_decoder(save_model(tmp_path), kernels=KernelOptions(backend=Backend.TRITON, **options))


@needs_triton
def test_a_shape_that_triton_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    expected = "the Triton kernels cannot run: head_dim 320 is odd or above 256; --kernels reference can"
    with pytest.raises(SetupError, match=expected):
        load_decoder(save_model(tmp_path, {"head_dim": 320}), kernels=TRITON)


def test_triton_is_not_imported_before_it_is_chosen() -> None:
    """Importing it would delay the start of every worker."""
    program = "import sys, kernels.choice; assert not {'triton', 'kernels.triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class TestOnHardware:
    """Models on a GPU."""

    pytestmark = gpu_only

    def test_a_model_on_a_gpu_is_computed_by_triton(self, tmp_path: Path) -> None:
        decoder = load_decoder(save_model(tmp_path), device="cuda")
        assert (decoder.kernels.backend, decoder.kernels.mode) == ("triton", "deterministic")

    def test_plain_torch_can_be_requested(self, tmp_path: Path) -> None:
        options = KernelOptions(backend=Backend.REFERENCE)
        assert load_decoder(save_model(tmp_path), device="cuda", kernels=options).kernels.backend == "reference"

    @pytest.mark.parametrize("options", [{"quantization": "int8"}, {"instruction_set": "portable"}])
    def test_options_for_the_cpp_kernels_are_refused(self, tmp_path: Path, options: dict[str, str]) -> None:
        with pytest.raises(SetupError, match=r"(int8|portable) needs the C\+\+ kernels: the model is on cuda:0"):
            load_decoder(save_model(tmp_path), device="cuda", kernels=KernelOptions(**options))
