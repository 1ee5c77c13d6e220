"""Two real models of one `pdserve up`: each answers as it does alone, and the loss of one's workers is no other's."""

from __future__ import annotations

import signal
from pathlib import Path

import openai
import pytest

from tests.support.cluster import Cluster, running_cluster
from tests.support.default_model import write_one_layer_model
from tests.support.depth import IS_FULL

FLAGS = ("--threads-per-worker", "1", "--kv-cache-memory", "4MiB", "--local-prefill", "threshold")
#: Several blocks, which prefill workers compute and cache.
PROMPT = "The same prompt for both models, long enough to be handed over. " * 8


def _answer(cluster: Cluster, model: str) -> tuple[str, int]:
    """The answer of a model, and how many tokens of the prompt were cached."""
    made = cluster.client().completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=16)
    assert made.usage is not None
    assert made.usage.prompt_tokens_details is not None
    return made.choices[0].text, made.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.skipif(not IS_FULL, reason="it starts two clusters: `make test-all ARGS=full-depth` runs it")
def test_two_models_answer_as_alone_and_share_no_prefix_and_no_worker(tmp_path: Path) -> None:
    first, second = (write_one_layer_model(tmp_path / name, seed) for name, seed in (("first", 1), ("second", 2)))
    with running_cluster(tmp_path / "alone", *FLAGS, model=str(second)) as alone:
        [expected, _] = _answer(alone, second.name)
    names = ("--served-model-name", "first", "--served-model-name", "second", "--alias", "other=second")
    with running_cluster(tmp_path / "both", str(second), *names, *FLAGS, model=str(first)) as both:
        assert [model.id for model in both.client().models.list()] == ["first", "second", "other"]
        of_first, cached = _answer(both, "first")
        assert cached == 0
        of_second, cached = _answer(both, "second")
        assert (of_second, cached) == (expected, 0)
        assert of_first != of_second
        assert _answer(both, "other")[0] == expected
        assert _answer(both, "other")[1] > 0
        with pytest.raises(openai.NotFoundError, match="This server has `first`, `second`, `other`"):
            _answer(both, "third")
        # Requests for the second model do not wait for a worker of the first.
        both.processes()["decode-0"].send_signal(signal.SIGSTOP)
        try:
            assert _answer(both, "second")[0] == expected
        finally:
            both.processes()["decode-0"].send_signal(signal.SIGCONT)
        assert _answer(both, "first")[0] == of_first
