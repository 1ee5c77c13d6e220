"""A step whose requests all end while it is computed ends early; no other step does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue

from torch import Tensor

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.decoder import Interrupt, LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.loop import StepLoop
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.step import StepOutput
from pdserve.model.batch import Batch
from tests.unit.engine.fakes import BLOCK_SIZE, CPU, KEY, FakeDecoder, expected, layout, limits

WAIT_S = 20
NUM_BLOCKS = 16
A, B = RequestId("a"), RequestId("b")
PROMPT = [1, 2, 3, 4, 5]
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class HeldDecoder(FakeDecoder):
    """Holds its first pass between two layers until `go_on`, or until it is interrupted."""

    def __init__(self) -> None:
        self.interrupt = Interrupt()
        self.entered, self.left = threading.Event(), threading.Event()
        self.num_passes = 0
        self._may_go_on = threading.Event()

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self.num_passes += 1
        if self.num_passes == 1:
            self.entered.set()
            assert self._may_go_on.wait(WAIT_S)
        self.interrupt.check()
        self.left.set()
        return super().forward(batch, kv_cache)

    def go_on(self) -> None:
        self._may_go_on.set()


class Rig:
    def __init__(self, decoder: HeldDecoder, interrupt: Interrupt | None) -> None:
        self.decoder = decoder
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = DecodeScheduler(self.pool, DecodeSchedulerConfig(limits=limits()))
        self.outputs: SimpleQueue[StepOutput] = SimpleQueue()
        runner = Runner(decoder, KvCache(layout(), NUM_BLOCKS, CPU), Sampler(), interrupt=interrupt)
        fatal: SimpleQueue[BaseException] = SimpleQueue()
        self.loop = StepLoop(self.scheduler, runner, publish=self.outputs.put, on_fatal=fatal.put)
        self.fatal = fatal

    def reserve(self, *request_ids: RequestId) -> None:
        def reserve() -> None:
            for request_id in request_ids:
                self.scheduler.reserve(
                    DecodeJob(
                        request_id=request_id,
                        prompt_token_ids=PROMPT,
                        params=PARAMS,
                        hash_key=KEY,
                        local_prefill_threshold=99,
                    )
                )

        self.loop.call(reserve).result(WAIT_S)

    def end(self, request_id: RequestId) -> Future[bool]:
        return self.loop.end(request_id, lambda: self.scheduler.abort(request_id))

    def tokens_of(self, request_id: RequestId) -> list[int]:
        """All tokens until the request is finished."""
        received: list[int] = []
        while True:
            events = self.outputs.get(timeout=WAIT_S).events
            assert not events.failures
            for tokens in events.tokens:
                if tokens.request_id == request_id:
                    received += [token for choice in tokens.choices for token in choice.token_ids]
            if any(each.request_id == request_id for each in events.finished):
                return received


@contextmanager
def running(*, can_interrupt: bool = True) -> Iterator[Rig]:
    decoder = HeldDecoder()
    rig = Rig(decoder, decoder.interrupt if can_interrupt else None)
    rig.loop.start()
    try:
        yield rig
    finally:
        decoder.go_on()
        rig.loop.stop()
    assert rig.fatal.empty()


LONE = expected(PROMPT, PARAMS, 0, limits())


def test_a_step_whose_only_request_ends_is_not_completed() -> None:
    with running() as rig:
        rig.reserve(A)
        assert rig.decoder.entered.wait(WAIT_S)
        ended = rig.end(A)
        rig.decoder.go_on()
        assert ended.result(WAIT_S)
        assert not rig.decoder.left.is_set()
        assert rig.loop.call(lambda: rig.pool.num_free).result(WAIT_S) == NUM_BLOCKS
        rig.loop.call(rig.scheduler.check_integrity).result(WAIT_S)


def test_the_next_request_of_that_id_is_computed_to_its_end() -> None:
    with running() as rig:
        rig.reserve(A)
        assert rig.decoder.entered.wait(WAIT_S)
        ended = rig.end(A)
        rig.decoder.go_on()
        ended.result(WAIT_S)
        rig.reserve(A)
        assert rig.tokens_of(A) == LONE


def test_a_step_that_also_computes_another_request_is_completed() -> None:
    with running() as rig:
        rig.reserve(A, B)
        assert rig.decoder.entered.wait(WAIT_S)
        ended = rig.end(A)
        rig.decoder.go_on()
        assert ended.result(WAIT_S)
        assert rig.decoder.left.is_set()
        assert rig.tokens_of(B) == LONE


def test_a_step_ends_once_all_of_its_requests_have_ended() -> None:
    with running() as rig:
        rig.reserve(A, B)
        assert rig.decoder.entered.wait(WAIT_S)
        ended = [rig.end(A), rig.end(B)]
        rig.decoder.go_on()
        assert all(each.result(WAIT_S) for each in ended)
        assert not rig.decoder.left.is_set()


def test_the_end_of_a_request_that_is_not_computed_changes_nothing() -> None:
    with running() as rig:
        rig.reserve(A)
        assert rig.decoder.entered.wait(WAIT_S)
        ended = rig.end(B)
        rig.decoder.go_on()
        assert not ended.result(WAIT_S)
        assert rig.tokens_of(A) == LONE


def test_a_request_whose_end_was_cancelled_is_computed() -> None:
    with running() as rig:
        rig.reserve(A)
        assert rig.decoder.entered.wait(WAIT_S)
        assert rig.end(A).cancel()
        rig.decoder.go_on()
        assert rig.tokens_of(A) == LONE


def test_without_an_interrupt_a_step_is_completed_first() -> None:
    with running(can_interrupt=False) as rig:
        rig.reserve(A)
        assert rig.decoder.entered.wait(WAIT_S)
        ended = rig.end(A)
        rig.decoder.go_on()
        assert ended.result(WAIT_S)
        assert rig.decoder.left.is_set()
