"""Reports of written layers: sent during the forward pass, true when sent, and in order with the outputs of steps."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId, RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device_runner import DeviceRunner
from pdserve.engine.graph_shapes import plan_graphs
from pdserve.engine.graphs import DeviceDecoder, GraphConfig
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.loop import StepLoop
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Sampled, SampleResult, SampleRow, Sequence
from pdserve.engine.step import LayersWritten, PrefillChunk, StepOutput, StepPlan
from pdserve.model.batch import Batch
from prefill_svc.request import PrefillJob, PrefillSchedulerConfig
from prefill_svc.scheduler import PrefillScheduler
from tests.support.devices import DEVICE, gpu_only, keep_busy
from tests.unit.engine.fakes import BLOCK_SIZE, CPU, KEY, VOCAB, FakeDecoder, expected, layout, limits
from tests.unit.engine.test_graphs import Recorder

WAIT_S = 20
LAYERS = KvLayout.uniform(model="m", dtype="float32", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
A, B = RequestId("a"), RequestId("b")
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


class Layered(FakeDecoder):
    """Calls back after each of three layers."""

    def __init__(self) -> None:
        self.listeners: list[LayerListener | None] = []

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self.listeners.append(on_layer)
        logits = super().forward(batch, kv_cache)
        for num_layers in (1, 2, 3) if on_layer is not None else ():
            on_layer(num_layers)
        return logits


class FakeEvent:
    """A device event that counts the waits for it."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


class CacheWithEvents(KvCache):
    """A cache that records its events."""

    def __init__(self) -> None:
        super().__init__(layout(), 16, CPU)
        self.events: list[FakeEvent] = []

    def record_event(self, num_layers: int) -> DeviceEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


def report(request_id: RequestId, num_layers: int) -> LayersWritten:
    return LayersWritten(
        request_id=request_id, attempt=0, num_layers=num_layers, num_computed=4, block_tables=((BlockId(0),),)
    )


def one_token() -> Batch:
    return Batch(
        token_ids=torch.tensor([3]),
        positions=torch.tensor([0]),
        slot_mapping=torch.tensor([0]),
        query_starts=torch.tensor([0, 1]),
        context_lens=torch.tensor([1]),
        block_tables=torch.zeros(1, 1, dtype=torch.int64),
        logits_rows=torch.tensor([0]),
    )


def test_reports_are_sent_after_their_layer_with_an_event() -> None:
    cache, decoder = CacheWithEvents(), Layered()
    plan = StepPlan(reports=(report(A, 3), report(A, 2), report(B, 3)))
    reported: list[LayersWritten] = []
    Runner(decoder, cache, Sampler()).forward(plan, one_token(), reported.append)
    at_2, at_3 = cache.events  # One for each layer with a report.
    assert reported == [
        replace(report(A, 2), ready_event=at_2),
        replace(report(A, 3), ready_event=at_3),
        replace(report(B, 3), ready_event=at_3),
    ]
    assert all(one.ready_event is other for one, other in zip(reported, (at_2, at_3, at_3), strict=True))


def test_a_plan_without_reports_has_no_listener() -> None:
    decoder, reported = Layered(), list[LayersWritten]()
    Runner(decoder, CacheWithEvents(), Sampler()).forward(StepPlan(), one_token(), reported.append)
    assert decoder.listeners == [None]
    assert reported == []


@dataclass(frozen=True, kw_only=True)
class FinishedSamples:
    """Samples that need no waiting."""

    token_ids: Tensor
    sampled: list[SampleResult]

    def results(self) -> list[SampleResult]:
        return self.sampled


class BlockingSampler(Sampler):
    """A sampler with the interface of a device's, whose launches have ended when they return."""

    def launch(
        self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int], *, is_ahead: bool = False
    ) -> FinishedSamples:
        sampled = self.sample(logits, rows, logits_rows)
        token_ids = [each.token_id for each in sampled if isinstance(each, Sampled)]
        return FinishedSamples(token_ids=torch.tensor(token_ids), sampled=sampled)


def prompt(*token_ids: int) -> StepPlan:
    """A plan that computes a whole prompt in one chunk and samples a token."""
    sequence = Sequence.from_prompt(A, token_ids, GREEDY, hash_key=KEY)
    sequence.block_table.append(BlockId(0))
    chunk = PrefillChunk(sequence=sequence, start=0, stop=len(token_ids), samples=(limits().sample_row(sequence, 0),))
    return StepPlan(chunks=(chunk,), reports=(report(A, 3), report(A, 2)))


def test_a_device_reports_layers_of_launched_steps_but_not_of_replayed_ones() -> None:
    cache, recorder, reported = CacheWithEvents(), Recorder(), list[LayersWritten]()
    decoder = DeviceDecoder(
        Layered(), CPU, GraphConfig(recorder=recorder, shapes=plan_graphs(1, 1, any_width=False), vocab_size=VOCAB)
    )
    runner = DeviceRunner(decoder, cache, BlockingSampler())
    assert decoder.record_next(cache.tensor, is_idle=False)

    def first_token(*token_ids: int) -> list[int]:
        plan = prompt(*token_ids)
        results = runner.launch(plan, runner.build(plan), reported.append)()
        return [each.token_id for each in results if isinstance(each, Sampled)]

    assert first_token(5, 6) == expected([5, 6], GREEDY, 0, limits())
    at_2, at_3 = cache.events
    assert reported == [replace(report(A, 2), ready_event=at_2), replace(report(A, 3), ready_event=at_3)]
    reported.clear()
    for token_id in (7, 8):  # A single row is replayed.
        assert first_token(token_id) == expected([token_id], GREEDY, 0, limits())
    assert recorder.num_recorded == 1
    assert reported == []


def test_a_cache_in_host_memory_needs_no_event() -> None:
    assert KvCache(layout(), 4, CPU).record_event(1) is None


class Overlapping(Runner):
    """A runner behind whose steps others could be launched."""

    overlaps = True


@pytest.mark.parametrize("runner_type", [Runner, Overlapping])
def test_reports_of_a_step_come_after_the_previous_output_and_before_its_own(
    runner_type: type[Runner],
) -> None:
    scheduler = PrefillScheduler(
        BlockPool(16, BLOCK_SIZE), PrefillSchedulerConfig(limits=limits(), max_num_batched_tokens=4)
    )
    published: SimpleQueue[StepOutput | LayersWritten] = SimpleQueue()
    loop = StepLoop(
        scheduler,
        runner_type(Layered(), KvCache(layout(), 16, CPU), Sampler()),
        publish=published.put,
        on_layers=published.put,
        on_fatal=lambda error: pytest.fail(str(error)),
    )
    job = PrefillJob(
        request_id=A,
        prompt_token_ids=[1, 2, 3, 4, 5, 6],
        params=SamplingParams(temperature=0.0, max_tokens=2),
        hash_key=KEY,
        report_layers=(1, 3),
    )
    loop.start()
    try:
        loop.call(lambda: scheduler.add(job)).result(WAIT_S)
        order = [layers_and_tokens(published.get(timeout=WAIT_S)) for _ in range(6)]
        assert order == [(1, 4), (3, 4), ("all", 4), (1, 6), (3, 6), ("all", 6)]
    finally:
        loop.stop()


def layers_and_tokens(event: StepOutput | LayersWritten) -> tuple[int | str, int]:
    match event:
        case LayersWritten(num_layers=num_layers, num_computed=num_computed):
            return num_layers, num_computed
        case StepOutput(events=events):
            return "all", events.progress[0].num_computed


def filled(num_blocks: int, device: torch.device = CPU) -> KvCache:
    cache = KvCache(LAYERS, num_blocks, device)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    return cache


def blocks(*ids: int) -> Items[BlockId]:
    return [BlockId(each) for each in ids]


def test_only_the_given_layers_of_blocks_are_copied() -> None:
    source, target = filled(3), KvCache(LAYERS, 3, CPU)
    on_host = [torch.zeros(1, 2, 2, 4, 8) for _ in range(2)]
    source.read_blocks(blocks(2, 0), on_host, slice(1, 2))
    target.write_blocks(blocks(0, 1), on_host, slice(1, 2))
    assert torch.equal(target.tensor[:2, 1], source.tensor[[2, 0], 1])
    assert not target.tensor[:, [0, 2]].any()
    assert not target.tensor[2].any()


def test_a_copy_waits_for_the_event_after_which_its_source_is_written() -> None:
    cache, event = filled(1), FakeEvent()
    cache.read_blocks(blocks(0), [torch.zeros(3, 2, 2, 4, 8)], slice(None), event)
    assert event.num_waits == 1


class TestOnHardware:
    """On a real GPU, where launched writes have not happened yet."""

    pytestmark = gpu_only

    def test_a_copy_sees_writes_before_its_event_and_does_not_wait_for_later_ones(self) -> None:
        cache = KvCache(LAYERS, 2, DEVICE)
        into = [torch.zeros(1, 2, 2, 4, 8, pin_memory=True)]
        keep_busy()
        cache.tensor[1, 0] = 5
        event = cache.record_event(1)
        keep_busy()
        cache.tensor[1, 0] = 6
        done = torch.cuda.Event()
        done.record()
        cache.read_blocks(blocks(1), into, slice(0, 1), event)
        assert (into[0] == 5).all()
        assert not done.query()
        torch.cuda.synchronize()
