"""One worker or one of each tier vanishes at each moment of a request: the answer is that of an undisturbed run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from pdserve.peers.workers import Tier
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.request.support import TEXT, TOKENS, after_first_token
from tests.integration.router_svc.script import Context, Fault, hang, vanish
from tests.support.tiny_model import END, NAME, tokens_of

#: The second choice is over before the first one. A message of a decode worker has one token of each.
REPLIES = [TOKENS, [*tokens_of("Bye!"), END]]
#: Points of a request's calls, and how often they are reached before the loss: reserving, queued, each chunk, before
#: and after the commit; the first token out and the second not, both choices open, the last token.
POINTS = [
    ("decode", 0),
    ("decode_ticket", 0),
    ("prefill", 0),
    ("prefill_queued", 0),
    ("prefill_started", 0),
    ("prefill_", 0),
    ("prefill_token", 0),
    ("prefill_commit", 0),
    ("prefill_committed", 0),
    ("decode_started", 0),
    ("decode_token", 0),
    ("decode_token", 2),
    ("decode_token", len(TOKENS) - 2),
]

Lose = Callable[[ScriptedCluster, Tier], Fault]


def that_worker(_: ScriptedCluster, __: Tier) -> Fault:
    """The worker of the call that reaches the point is lost."""
    return vanish


def both_workers(cluster: ScriptedCluster, other: Tier) -> Fault:
    """The request's worker of the other tier is lost as well. If it has no call, the next one finds it dead."""

    async def vanish_together(context: Context) -> None:
        if not cluster.calls.cut(other):
            cluster.script.fail(other, vanish)
        await vanish(context)

    return vanish_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request, and which workers it loses."""

    lose: Lose
    n: int = 1
    streamed: bool
    stop: str | None = None

    def __str__(self) -> str:
        return f"{self.lose.__name__}-{self.n}-{'streamed' if self.streamed else 'whole'}"


CASES = [
    Case(lose=lose, n=n, streamed=streamed)
    for lose, n, streamed in product((that_worker, both_workers), (1, 2), (False, True))
]


async def answer_of(cluster: ScriptedCluster, request_id: str, case: Case) -> dict[str, Any]:
    """What a client makes of the answer to one request: everything but its id, its time and how it was cut."""
    body: dict[str, Any] = {"prompt": "Say hello", "max_tokens": 50, "n": case.n, "logprobs": 2, "stop": case.stop}
    headers = {"X-Request-Id": request_id}
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": defaultdict(list), "ends": []})
    usages = []
    async with cluster.client() as client:
        if case.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            pieces = [
                piece async for piece in await client.completions.create(model=NAME, extra_headers=headers, **body)
            ]
        else:
            pieces = [await client.completions.create(model=NAME, extra_headers=headers, **body)]
    for piece in pieces:
        usages += [piece.usage.model_dump()] if piece.usage is not None else []
        for choice in piece.choices:
            joined = choices[choice.index]
            joined["text"] += choice.text
            joined["ends"] += [choice.finish_reason] if choice.finish_reason is not None else []
            for name, values in (choice.logprobs.model_dump() if choice.logprobs is not None else {}).items():
                joined["logprobs"][name] += values
    return {"choices": dict(choices), "usages": usages}


# One cluster for all cases of a moment: to start it takes longer than its requests.
@pytest.mark.parametrize(("point", "passes"), POINTS)
async def test_a_loss_at_any_point_changes_nothing_for_the_client(
    cluster: ScriptedCluster, point: str, passes: int
) -> None:
    cluster.script.replies = REPLIES
    for case in CASES:
        answer = await undisturbed_although_lost(cluster, point, passes, case)
        assert answer["usages"][0]["completion_tokens"] == sum(map(len, REPLIES[: case.n]))


@pytest.mark.parametrize(("stop", "text"), [("lo wor", "Hel"), ("lo work", TEXT)])
async def test_a_loss_within_a_stop_string_changes_nothing_for_the_client(
    cluster: ScriptedCluster, stop: str, text: str
) -> None:
    """Its start is held back when the decode worker is lost. Fails if that is sent, forgotten, or searched anew."""
    for passes, streamed in product(range(3, 8), (False, True)):
        case = Case(lose=that_worker, streamed=streamed, stop=stop)
        answer = await undisturbed_although_lost(cluster, "decode_token", passes, case)
        assert answer["choices"][0]["text"] == text
        [continued] = cluster.calls.decode_starts[-1].output
        assert list(continued.token_ids) == TOKENS[: passes + 1], "the loss was not where it should be"


async def undisturbed_although_lost(cluster: ScriptedCluster, point: str, passes: int, case: Case) -> dict[str, Any]:
    """The answer to a request, which is the same with the loss at the point once it has been passed so often."""
    undisturbed = await answer_of(cluster, f"undisturbed-{case}", case)
    [usage] = undisturbed["usages"]
    tokens_before, starts_before = await cluster.metric("generation_tokens_total"), len(cluster.calls.decode_starts)
    _script_loss(cluster, point, passes, case)

    assert await answer_of(cluster, str(case), case) == undisturbed

    assert not any(cluster.script.faults.values()), "no loss has occurred"
    await cluster.calls.until(lambda: cluster.calls.num_open == 0)
    assert await cluster.metric("generation_tokens_total") == tokens_before + usage["completion_tokens"]
    record = await cluster.trace(str(case))
    assert record["outcome"]["completion_tokens"] == usage["completion_tokens"]
    if point == "prefill_committed" and case.lose is that_worker:
        assert len(cluster.calls.decode_starts) == starts_before + 1, "work was done again that was not lost"
    else:
        assert "peer_lost" in [retry["reason"] for retry in record["retries"]]
    for worker in cluster.workers.values():
        cluster.router.cluster.directory.mark_alive(worker.record.worker_id, worker.record.epoch)
    return undisturbed


def _script_loss(cluster: ScriptedCluster, point: str, passes: int, case: Case) -> None:
    fault = case.lose(cluster, "prefill" if point.startswith("decode") else "decode")
    if point in ("decode_started", "decode_token"):
        fault = after_first_token(cluster, fault, request_id=str(case))
    if point == "prefill_committed" and case.lose is both_workers:
        # Else the decode worker has sent every token before it is lost.
        cluster.script.fail("decode_started", hang)
    cluster.script.fail(point, *[None] * passes, fault)
