"""Promise 1 at the cluster, in the default dtype: an answer depends on its request and on nothing else.

The reference is each request alone on a cluster with one prefill and one decode worker and cold caches. The same
requests then arrive all at once, at workers with warm or cold caches, without a prefill worker, with another number of
threads and other chunk sizes, streamed instead of whole, and at a worker that runs out of blocks. Every byte stays the
same except ids, times and the number of cached tokens.

Only the full depth serves all layers of the default model instead of the first four, sends 50 requests instead of 20,
which combine prompts and options in more ways, and sends each alone to warm caches without a prefill worker.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence

import pytest

from kernels.choice import instruction_sets
from tests.support import depth
from tests.support.answers import CHAT, COMPLETIONS, OPEN_THINKING, Call, differences, make_calls, send_all
from tests.support.cluster import Cluster, running_cluster
from tests.support.default_model import NUM_LAYERS, model_for_depth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not instruction_sets(), reason="the C++ kernels are not built; the reference is only close"),
]

#: 20 requests have every prompt, every option, both endpoints and both ways of sending; 50 also have more combinations.
CALLS = make_calls(50 if depth.IS_FULL else 20)
BLOCK_SIZE = 16
TRUSTING = ("--trust-request-chat-template",)
#: 48 blocks: enough for the longest request alone, too few for a crowd.
SCARCE, ROOMY = (str(NUM_LAYERS * (size << 20) // 30) for size in (17, 256))
#: Eight sequences of 112 new tokens, 7 blocks each. Any one of them fits into those 48 blocks, all eight never do.
_CHOICES = {"n": 8, "max_tokens": 112, "temperature": 0.9, "seed": 5, "ignore_eos": True}
_ASK = {"messages": [{"role": "user", "content": "Name rivers."}], **_CHOICES}
_LONG = {"type": "object", "properties": {"text": {"type": "string", "minLength": 2000}}, "required": ["text"]}
CHOICES = {
    "free": Call(path=COMPLETIONS, body={"prompt": "A list of rivers:", **_CHOICES}, stream=False),
    "schema": Call(
        path=COMPLETIONS,
        body={"prompt": "A list of rivers:", **_CHOICES, "structured_outputs": {"json": _LONG}},
        stream=True,
    ),
    "tool": Call(
        path=CHAT,
        body={
            **_ASK,
            "tools": [{"type": "function", "function": {"name": "note", "parameters": _LONG}}],
            "tool_choice": "required",
        },
        stream=True,
    ),
    "thinking": Call(
        path=CHAT,
        body={
            **_ASK,
            "chat_template": OPEN_THINKING,
            "thinking_token_budget": 40,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _LONG}},
        },
        stream=False,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the clusters serve."""
    return model_for_depth(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """One prefill and one decode worker that share the cores."""
    flags = ("--kv-cache-memory", ROOMY, *TRUSTING)
    with running_cluster(tmp_path_factory.mktemp("disaggregated"), *flags, model=model) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def monolithic(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """A decode worker alone, with all cores and another chunk size."""
    flags = ("--prefill", "0", "--max-num-batched-tokens", "200", "--kv-cache-memory", ROOMY)
    with running_cluster(tmp_path_factory.mktemp("monolithic"), *flags, model=model) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def scarce(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """A cluster with too few blocks, in which the prefill worker computes every prompt."""
    flags = ("--kv-cache-memory", SCARCE, "--local-prefill-threshold", "0", *TRUSTING)
    with running_cluster(tmp_path_factory.mktemp("scarce"), *flags, model=model) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(disaggregated: Cluster) -> list[str]:
    """The answer to every request by itself."""
    answers = asyncio.run(send_all(disaggregated, CALLS, at_once=1))
    assert len({*answers}) == len(CALLS), "Two requests have the same answer, so a mix-up would go unnoticed."
    lengths = {json.loads(answer)["usage"]["prompt_tokens"] for answer in answers}
    assert min(lengths) < BLOCK_SIZE, lengths
    assert max(lengths) > 512, lengths
    assert any(length % BLOCK_SIZE == 0 for length in lengths), lengths
    return answers


def test_workers_compute_with_the_instruction_set_of_their_environment(disaggregated: Cluster) -> None:
    # `tests.machines` sets these variables. Without them, workers use the best set.
    for tier in ("prefill", "decode"):
        name = os.environ.get(f"PDSERVE_{tier.upper()}__INSTRUCTION_SET", instruction_sets()[0])
        assert disaggregated.worker_metric(tier, "pdserve_kernels_info", instruction_set=name) == 1


async def _assert_answers(cluster: Cluster, calls: Sequence[Call], expected: Sequence[str], *, at_once: int) -> None:
    answers = await send_all(cluster, calls, at_once=at_once)
    found = differences(calls, answers, expected)
    assert not found, found
    cluster.wait_idle()


async def test_a_crowd_warm_caches_and_streaming_change_nothing(disaggregated: Cluster, alone: list[str]) -> None:
    hits = disaggregated.worker_metric("decode", "pdserve_prefix_cache_hits_total")
    turned = [call.turned() for call in CALLS]
    await _assert_answers(disaggregated, turned, alone, at_once=len(CALLS))
    assert disaggregated.worker_metric("decode", "pdserve_prefix_cache_hits_total") > hits + 500
    assert disaggregated.worker_metric("decode", "pdserve_kv_transfer_blocks_total", direction="received") > 0


async def test_a_crowd_with_cold_caches_and_no_prefill_worker_changes_nothing(
    monolithic: Cluster, alone: list[str]
) -> None:
    # In reverse order: a request that found a shared prefix in the cache now computes it.
    await _assert_answers(monolithic, CALLS[::-1], alone[::-1], at_once=len(CALLS))


@pytest.mark.skipif(not depth.IS_FULL, reason="a crowd has warm caches, too: `make test-all ARGS=full-depth` runs it")
async def test_each_request_alone_with_warm_caches_and_no_prefill_worker_has_the_same_answer(
    monolithic: Cluster, alone: list[str]
) -> None:
    await _assert_answers(monolithic, CALLS, alone, at_once=1)


async def test_preemption_changes_nothing(scarce: Cluster, disaggregated: Cluster, alone: list[str]) -> None:
    free, *others = await send_all(disaggregated, [*CHOICES.values()], at_once=1)
    await _assert_answers(scarce, [CHOICES["free"], *CALLS], [free, *alone], at_once=len(CALLS) + 1)
    for kind, expected in zip(CHOICES, [free, *others], strict=True):
        before = scarce.worker_metric("decode", "pdserve_num_preemptions_total")
        # The choices of one request run together, so blocks run out however fast or slow other prompts arrive.
        await _assert_answers(scarce, [CHOICES[kind]], [expected], at_once=1)
        assert scarce.worker_metric("decode", "pdserve_num_preemptions_total") > before, kind
