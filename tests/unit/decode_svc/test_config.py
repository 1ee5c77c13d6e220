"""In how many groups of layers a decode worker has blocks sent."""

from __future__ import annotations

import pytest

from decode_svc.config import DecodeConfig
from pdserve.base.errors import SetupError


def config(**changes: object) -> DecodeConfig:
    return DecodeConfig(model="m", redis_url="", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "num_layers", "groups"), [("cpu", 32, 1), ("cuda", 32, 4), ("cuda:1", 32, 4), ("cuda", 3, 3)]
)
def test_without_a_number_there_are_groups_only_where_layers_are_launched_one_by_one(
    device: str, num_layers: int, groups: int
) -> None:
    assert config(device=device).groups_of(num_layers) == groups


def test_a_number_is_taken_as_it_is_up_to_one_group_a_layer() -> None:
    assert [config(layer_groups=groups).groups_of(4) for groups in (1, 3, 4)] == [1, 3, 4]
    assert config(device="cuda", layer_groups=1).groups_of(4) == 1
    with pytest.raises(SetupError, match="--layer-groups 5 is more than the model has layers, 4"):
        config(layer_groups=5).groups_of(4)
