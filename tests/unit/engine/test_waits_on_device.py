"""Steps wait for the device only where they collect results, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.devices import DEVICE, gpu_only

pytest.importorskip("triton")

from kernels.choice import Backend, KernelOptions
from pdserve.engine.device_sampler import DeviceSampler
from tests.property.model.tiny_models import make_decoder
from tests.unit.engine.test_step_on_device import FIELDS, recording, tokens_of

pytestmark = gpu_only


@pytest.fixture
def no_hidden_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_a_hidden_wait_is_detected(no_hidden_waits: None) -> None:
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        torch.zeros(1, device=DEVICE).item()


def test_prompts_and_graphs_are_computed_without_hidden_waits(request: pytest.FixtureRequest) -> None:
    # One layer: each kernel of a step is launched, and a simulated GPU takes its time for each.
    fields = FIELDS | {"num_hidden_layers": 1}
    model = make_decoder(fields, KernelOptions(backend=Backend.TRITON), torch.float32, device=DEVICE)
    replaying, cache = recording(model)
    sampler = DeviceSampler(DEVICE)
    first = tokens_of(replaying, sampler, model, cache=cache, together=True)  # Compiling waits.
    request.getfixturevalue("no_hidden_waits")
    assert tokens_of(replaying, sampler, model, cache=cache, together=True) == first
