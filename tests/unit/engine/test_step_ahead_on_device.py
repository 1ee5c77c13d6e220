"""Requests on a device get the same tokens and log-probabilities with and without steps launched ahead, bit for bit."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import pytest
import torch
from torch import Tensor

from tests.support.devices import DEVICE

pytest.importorskip("triton")

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.choice import Backend, KernelOptions
from kernels.decoder import LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device_runner import DeviceRunner
from pdserve.engine.device_sampler import DeviceSampler
from pdserve.engine.graph_shapes import plan_graphs
from pdserve.engine.graphs import Compute, DeviceDecoder, GraphConfig
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.pace import Pace
from pdserve.engine.runner import Runner
from pdserve.engine.step import StepOutput, StepPlan
from pdserve.engine.stepper import Stepper
from pdserve.model.batch import Batch
from pdserve.model.decoder import Decoder
from pdserve.model.thinking import OutputGrammar
from tests.property.model.tiny_models import make_decoder
from tests.support.depth import IS_FULL
from tests.unit.engine.fakes import KEY
from tests.unit.engine.late import WatchedScheduler
from tests.unit.engine.letters import FOLLOWING, FollowingGrammar, bounded
from tests.unit.engine.test_step_on_device import ALWAYS, BLOCK_SIZE, BOUNDS, FIELDS, recorder

_FULL = pytest.mark.skipif(not IS_FULL, reason="one of many cases: `make test-all ARGS=full-depth` runs it")
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
EOS = 2
PLAIN = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
#: Two thirds of the tokens that are allowed may not follow one of them.
RULES = replace(PLAIN, temperature=1.0, allowed_token_ids=tuple(range(16)))
PAIRS = tuple((first, second) for first in range(16) for second in range(16) if (first + second) % 3 < 2)
#: Position of the token from whose logits nothing can be sampled.
NAN_POSITION = 45


@dataclass(frozen=True, kw_only=True)
class TimedRequest:
    """One request."""

    prompt_length: int
    params: SamplingParams
    #: Numbers of the runs of steps before which it arrives, and before which it is aborted.
    comes: int = 0
    leaves: int | None = None
    #: What its grammar allows is sometimes not found in time.
    is_slow: bool = False


class LookingTwice(FollowingGrammar):
    """What may follow every fifth token is found when it is looked for again."""

    #: Numbers of tokens of outputs that had ended when it was looked for what may follow.
    behind_end: ClassVar[list[int]] = []

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._looks: Counter[int] = Counter()

    def start(self) -> LookingTwice:
        return LookingTwice(self._vocab_size)

    def find(self, tokens: array[int], num_prompt: int) -> None:
        self._looks[len(tokens)] += 1
        if tokens[-1] == EOS:
            self.behind_end.append(len(tokens))

    def is_found(self, tokens: array[int], num_prompt: int) -> bool:
        return self._looks[len(tokens)] > (len(tokens) % 5 == 0)

    def as_grammar(self) -> OutputGrammar:
        """For fields that take a grammar."""
        return cast(OutputGrammar, self)


class NanAt:
    """The logits of one position are NaN."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        is_broken = batch.positions[batch.logits_rows] == NAN_POSITION
        return self._decoder.forward(batch, kv_cache).masked_fill(is_broken.unsqueeze(1), float("nan"))


class Noting:
    """Records graphs, and notes for each change of graph whether the step was launched ahead, with one in flight."""

    def __init__(self, plans: list[StepPlan]) -> None:
        self._plans = plans
        self._recorder = recorder()
        self._last: Compute | None = None
        self.changes: list[bool] = []

    def record(self, compute: Compute) -> Compute:
        replay = self._recorder.record(compute)

        def noted() -> Tensor:
            if self._last is not replay:
                self.changes.append(self._plans[-1].is_ahead)
            self._last = replay
            return replay()

        return noted


@dataclass
class Published:
    """All that was published about some requests."""

    choices: dict[tuple[RequestId, int], list[ChoiceTokens]] = field(default_factory=dict)
    failed: dict[RequestId, str] = field(default_factory=dict)
    num_steps: int = 0
    num_ahead: int = 0
    num_preempted: int = 0
    changed_ahead: list[bool] = field(default_factory=list)

    def take(self, output: StepOutput) -> None:
        self.num_steps += 1
        self.num_ahead += output.is_ahead
        self.num_preempted += len(output.events.preempted)
        for tokens in output.events.tokens:
            for choice in tokens.choices:
                self.choices.setdefault((tokens.request_id, choice.choice_index), []).append(choice)
        for failure in output.events.failures:
            self.failed[failure.request_id] = str(failure.error)


@pytest.fixture(scope="module")
def model() -> Decoder:
    # One layer: what runs ahead is steps, whatever is in them, and the interpreter takes its time for each kernel.
    fields = FIELDS | {"num_hidden_layers": 1}
    return make_decoder(fields, KernelOptions(backend=Backend.TRITON), torch.float32, device=DEVICE)


def serve(
    model: Decoder,
    requests: list[TimedRequest],
    *,
    num_blocks: int,
    is_ahead: bool,
    is_replayed: bool,
    block_size: int = BLOCK_SIZE,
    has_all_graphs: bool = False,
) -> Published:
    """Serves all requests to their end, in runs of up to 4 steps.

    Graphs beyond the first ones are recorded at the start, or between runs.
    """
    config = model.config
    layout = KvLayout.uniform(
        model="tiny",
        dtype="float32",
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    pool, plans = BlockPool(num_blocks, block_size), list[StepPlan]()
    scheduler = DecodeScheduler(pool, DecodeSchedulerConfig(limits=BOUNDS))
    shapes = plan_graphs(8, pool.blocks_for(BOUNDS.max_model_len), any_width=False)
    noting = Noting(plans)
    graphs = GraphConfig(recorder=noting, shapes=shapes, vocab_size=97)
    decoder = DeviceDecoder(NanAt(model), DEVICE, graphs if is_replayed else None)
    runner_type = DeviceRunner if is_ahead else Runner
    cache, published = KvCache(layout, num_blocks, DEVICE), Published(changed_ahead=noting.changes)

    def record_next(is_idle: bool) -> bool:
        with torch.inference_mode():
            return decoder.record_next(cache.tensor, is_idle=is_idle)

    runner = runner_type(decoder, cache, DeviceSampler(DEVICE), record_next=record_next)
    while runner.prepare(is_idle=False) or runner.prepare(is_idle=has_all_graphs):
        pass
    stepper = Stepper(WatchedScheduler(scheduler, scheduler.check_integrity, Pace, plans), runner, published.take)
    _run(scheduler, stepper, runner, requests, is_ahead=is_ahead)
    assert pool.num_free == num_blocks
    return published


def _run(
    scheduler: DecodeScheduler, stepper: Stepper, runner: Runner, requests: list[TimedRequest], *, is_ahead: bool
) -> None:
    run = 0
    while scheduler.has_work() or run <= max(request.comes for request in requests):
        for index, request in enumerate(requests):
            if request.comes == run:
                scheduler.reserve(_job(index, request))
            if request.leaves == run:
                scheduler.abort(RequestId(f"r{index}"))
        answers = iter([is_ahead] * 3)
        if scheduler.has_work():
            with torch.inference_mode():  # As on the step thread.
                stepper.step(lambda answers=answers: next(answers, False))
            stepper.publish()
        if run % 2:
            runner.prepare(is_idle=True)
        run += 1


def _job(index: int, request: TimedRequest) -> DecodeJob:
    return DecodeJob(
        request_id=RequestId(f"r{index}"),
        prompt_token_ids=[(index * 7 + 3 * position) % 97 for position in range(request.prompt_length)],
        params=request.params,
        hash_key=KEY,
        local_prefill_threshold=ALWAYS,
        grammar=LookingTwice(97).as_grammar() if request.is_slow else bounded(request.params, 97),
    )


REQUESTS = {
    "of all kinds": [
        TimedRequest(prompt_length=13, params=PLAIN),
        TimedRequest(prompt_length=16, params=replace(PLAIN, n=2, seed=3, temperature=0.8, top_p=0.9, logprobs=2)),
        TimedRequest(prompt_length=3, params=replace(PLAIN, seed=5, temperature=1.2, top_k=20, max_tokens=4), comes=1),
        TimedRequest(prompt_length=21, params=replace(PLAIN, repetition_penalty=1.3), comes=3),
    ],
    "that end": [
        TimedRequest(prompt_length=10, params=replace(PLAIN, max_tokens=10)),
        TimedRequest(
            prompt_length=8,
            params=SamplingParams(seed=1, temperature=1.0, logit_bias={EOS: 4.0}, min_tokens=2, max_tokens=10),
        ),
        TimedRequest(
            prompt_length=9,
            params=replace(PLAIN, seed=2, temperature=1.0, stop_token_ids=tuple(range(60)), min_tokens=2),
        ),
        TimedRequest(prompt_length=20, params=replace(PLAIN, max_tokens=20), leaves=2),
    ],
    "with rules for tokens": [
        TimedRequest(prompt_length=13, params=replace(RULES, bad_words=PAIRS, seed=1, max_tokens=10)),
        TimedRequest(prompt_length=7, params=replace(RULES, bad_words=((3,), (5,)), seed=2, n=2, max_tokens=24)),
        TimedRequest(prompt_length=9, params=replace(RULES, seed=3, logprobs=1, max_tokens=24)),
    ],
    "with grammars": [
        TimedRequest(prompt_length=13, params=replace(PLAIN, grammar=FOLLOWING, max_tokens=12)),
        TimedRequest(prompt_length=9, params=replace(PLAIN, seed=1, temperature=1.0, presence_penalty=1.0, n=2)),
        TimedRequest(
            prompt_length=6,
            params=replace(PLAIN, grammar=FOLLOWING, seed=2, temperature=1.0, frequency_penalty=0.5, logprobs=1),
            comes=1,
        ),
        TimedRequest(
            prompt_length=8,
            params=replace(PLAIN, grammar=FOLLOWING, seed=3, temperature=1.0, stop_token_ids=tuple(range(0, 97, 4))),
        ),
        TimedRequest(prompt_length=11, params=replace(PLAIN, max_tokens=16)),
    ],
    "with grammars that take long": [
        TimedRequest(prompt_length=13, params=replace(PLAIN, grammar=FOLLOWING, max_tokens=32), is_slow=True),
        TimedRequest(prompt_length=9, params=replace(PLAIN, seed=1, temperature=1.0, max_tokens=36)),
        *(
            TimedRequest(
                prompt_length=11 + index,  # Rows of first tokens are made anew in each step: they look once.
                params=replace(
                    PLAIN, grammar=FOLLOWING, seed=index, temperature=1.0, logit_bias={EOS: 7.0}, min_tokens=index
                ),
                comes=index,
                is_slow=True,
            )
            for index in range(4)
        ),
    ],
    "of which some fail": [
        TimedRequest(prompt_length=41, params=replace(PLAIN, n=2, seed=4, temperature=1.0)),
        TimedRequest(prompt_length=6, params=replace(PLAIN, logprobs=0)),
    ],
}


@pytest.mark.parametrize(
    ("kind", "is_replayed"),
    [
        ("of all kinds", True),
        ("that end", False),
        ("with grammars", False),
        ("with grammars that take long", True),
        pytest.param(
            "with rules for tokens",
            False,
            marks=_FULL,
        ),
        pytest.param("of which some fail", True, marks=_FULL),
    ],
)
def test_running_ahead_publishes_the_same_tokens(model: Decoder, kind: str, is_replayed: bool) -> None:
    ahead = serve(model, REQUESTS[kind], num_blocks=40, is_ahead=True, is_replayed=is_replayed)
    waiting = serve(model, REQUESTS[kind], num_blocks=40, is_ahead=False, is_replayed=is_replayed)
    if kind == "that end":
        ended = {choice[0]: tokens[-1].finish_reason for choice, tokens in waiting.choices.items()}
        assert [ended.get(RequestId(f"r{index}")) for index in range(4)] == [LENGTH, STOP, STOP, None]
        # When a request is aborted, it has more tokens if it ran ahead.
        more, fewer = ahead.choices.pop((RequestId("r3"), 0)), waiting.choices.pop((RequestId("r3"), 0))
        assert more[: len(fewer)] == fewer
    assert ahead.choices == waiting.choices
    assert ahead.failed == waiting.failed
    assert list(ahead.failed) == ([RequestId("r0")] if kind == "of which some fail" else [])
    assert waiting.num_ahead == 0
    assert ahead.num_ahead > ahead.num_steps / 4
    assert not LookingTwice.behind_end


@_FULL
def test_running_out_of_blocks_changes_no_token(model: Decoder) -> None:
    requests = [
        TimedRequest(prompt_length=12, params=PLAIN),
        TimedRequest(prompt_length=12, params=replace(PLAIN, seed=1, temperature=1.0)),
    ]
    scarce = serve(model, requests, num_blocks=3, is_ahead=True, is_replayed=True)
    plenty = serve(model, requests, num_blocks=40, is_ahead=False, is_replayed=True)
    assert scarce.choices == plenty.choices
    assert scarce.num_preempted == 1
    assert scarce.num_ahead > 3


def test_a_table_that_gets_wider_takes_another_graph_while_a_step_is_in_flight(model: Decoder) -> None:
    # With runs of four steps, the third step of the second decoding run starts the 17th block.
    requests = [
        TimedRequest(prompt_length=58, params=replace(PLAIN, seed=6, temperature=1.0, logprobs=0, max_tokens=8))
    ]
    ahead = serve(model, requests, num_blocks=20, is_ahead=True, is_replayed=True, block_size=4, has_all_graphs=True)
    waiting = serve(model, requests, num_blocks=20, is_ahead=False, is_replayed=False, block_size=4)
    assert ahead.changed_ahead == [False, True]
    assert ahead.choices == waiting.choices
    assert [len(published) for published in ahead.choices.values()] == [8]
