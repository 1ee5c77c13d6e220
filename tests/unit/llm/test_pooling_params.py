"""Parameters of embeddings: what is sent, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve import PoolingParams


def test_only_what_is_set_is_sent() -> None:
    assert PoolingParams().as_fields() == {}
    assert PoolingParams(dimensions=4, use_activation=False).as_fields() == {"dimensions": 4, "normalize": False}
    assert PoolingParams(
        normalize=True, use_activation=True, truncate_prompt_tokens=-1, prompt_name="q"
    ).as_fields() == {
        "normalize": True,
        "truncate_prompt_tokens": -1,
        "prompt_name": "q",
    }


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"normalize": True, "use_activation": False}, "use_activation"),
        ({"add_special_tokens": "yes"}, "add_special_tokens"),
    ],
)
def test_what_no_server_accepts_is_refused_by_its_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        PoolingParams(**fields)
