"""What follows from the device of a decode worker: the layer groups in which it receives blocks, the size of steps."""

from __future__ import annotations

import pytest

from decode_svc.config import DecodeConfig
from pdserve.base.errors import SetupError


def config(**changes: object) -> DecodeConfig:
    return DecodeConfig(model="m", redis_url="", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "num_layers", "groups"), [("cpu", 32, 1), ("cuda", 32, 4), ("cuda:1", 32, 4), ("cuda", 3, 3)]
)
def test_by_default_layers_are_grouped_only_on_devices_that_launch_them_one_by_one(
    device: str, num_layers: int, groups: int
) -> None:
    assert config(device=device).num_layer_groups(num_layers) == groups


def test_a_configured_number_is_used_unless_it_exceeds_the_number_of_layers() -> None:
    assert [config(layer_groups=groups).num_layer_groups(4) for groups in (1, 3, 4)] == [1, 3, 4]
    assert config(device="cuda", layer_groups=1).num_layer_groups(4) == 1
    with pytest.raises(SetupError, match="--layer-groups is 5, but the model has 4 layers"):
        config(layer_groups=5).num_layer_groups(4)


@pytest.mark.parametrize(("device", "limits"), [("cpu", (512, 64)), ("cuda", (4096, 128)), ("cuda:1", (4096, 128))])
def test_the_size_of_steps_follows_the_device(device: str, limits: tuple[int, int]) -> None:
    steps = config(device=device)
    assert (steps.max_prompt_tokens, steps.max_decoding) == limits
    set_by_flags = config(device=device, max_num_batched_tokens=7, max_num_seqs=3)
    assert (set_by_flags.max_prompt_tokens, set_by_flags.max_decoding) == (7, 3)
