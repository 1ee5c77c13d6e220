"""Two tiers' schedulers over one pool: they take turns, wake each other up, and leave each other's blocks alone."""

from __future__ import annotations

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from pdserve.base.ids import RequestId, RouterId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.pace import Pace
from pdserve.engine.running import RunningLimits
from pdserve.engine.sequence import Sampled, unprepared
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.shared import SharedScheduler
from pdserve.engine.step import StepEvents, StepPlan
from prefill_svc.request import PrefillJob, PrefillSchedulerConfig
from prefill_svc.scheduler import PrefillScheduler

KEY = bytes(32)
BLOCK = 4
ROUTER = RouterId("r")
#: Four prompt tokens take half as long as a step that decodes, which is what prompts may add to it.
PACE = Pace(decode_step_s=0.02, prefill_token_s=0.0025)


class Engine:
    """Both schedulers, and steps that sample the token 5."""

    def __init__(self, num_blocks: int, *, max_tokens: int = 8, min_prefill: int = 4) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        limits = SequenceLimits(max_model_len=100, vocab_size=50, eos_token_ids=frozenset())
        self.prefill = PrefillScheduler(
            self.pool, PrefillSchedulerConfig(limits=limits, max_num_batched_tokens=max_tokens)
        )
        self.decode = DecodeScheduler(self.pool, DecodeSchedulerConfig(limits=limits, max_num_seqs=4))
        running = RunningLimits(
            max_num_seqs=4, max_num_batched_tokens=max_tokens, itl_budget_s=0.0, min_prefill_tokens=min_prefill
        )
        self.shared = SharedScheduler(self.pool, prefill=self.prefill, decode=self.decode, limits=running)

    def step(self) -> tuple[StepPlan, StepEvents]:
        assert self.shared.has_work()
        plan = self.shared.schedule(PACE)
        rows, _ = plan.sample_rows()
        return plan, self.shared.update(plan, [Sampled(token_id=5) for _ in rows])

    def prompt(self, name: str, length: int) -> None:
        self.prefill.add(
            PrefillJob(
                request_id=RequestId(name),
                prompt_token_ids=tuple(range(1, length + 1)),
                params=SamplingParams(max_tokens=4, ignore_eos=True),
                hash_key=KEY,
                router_id=ROUTER,
            )
        )

    def decoding(self, name: str, length: int, max_tokens: int = 4) -> None:
        self.decode.reserve(
            DecodeJob(
                request_id=RequestId(name),
                prompt_token_ids=tuple(range(10, length + 10)),
                params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                hash_key=KEY,
                router_id=ROUTER,
            )
        )
        self.decode.prefill_locally(RequestId(name))


def test_tiers_take_turns_and_events_name_theirs() -> None:
    engine = Engine(40)
    engine.decoding("both", 4, max_tokens=5)
    engine.prompt("both", 20)
    turns, prompts = list[str](), list[int]()
    while engine.shared.has_work():
        plan, events = engine.step()
        turns.append(events.tier)
        if events.tier == "prefill":
            prompts.append(plan.num_prefill_tokens)
    assert turns == ["decode", "prefill"] * 5
    # Between two tokens no prompt is computed in whole.
    assert prompts == [4, 4, 4, 4, 4]


def test_alone_each_tier_has_its_own_limits() -> None:
    engine = Engine(40)
    engine.prompt("p", 20)
    assert [engine.step()[0].num_prefill_tokens for _ in range(3)] == [8, 8, 4]
    assert not engine.shared.has_work()


def test_a_prompt_that_waits_for_blocks_gets_those_of_the_other_tier() -> None:
    """Its scheduler cannot know that they were freed: nothing of its own has changed."""
    engine = Engine(4)
    engine.decoding("d", 7, max_tokens=3)
    engine.step()
    engine.prompt("p", 12)
    while engine.decode.load().num_running:
        engine.step()
    while engine.shared.has_work():
        engine.step()
    assert engine.prefill.num_computed(RequestId("p")) == 12
    engine.prefill.release(RequestId("p"))
    engine.pool.check_integrity([])
    assert engine.pool.num_free == 4


def test_a_request_that_waits_for_blocks_gets_those_of_a_released_prompt() -> None:
    engine = Engine(4)
    engine.prompt("p", 12)
    while engine.shared.has_work():
        engine.step()
    engine.decoding("d", 7, max_tokens=2)
    engine.step()
    assert not engine.shared.has_work()
    engine.prefill.release(RequestId("p"))
    while engine.shared.has_work():
        engine.step()
    assert engine.pool.num_free == 4


def test_a_failure_ends_the_request_of_the_tier_at_work() -> None:
    engine = Engine(40)
    engine.decoding("x", 4)
    engine.prompt("x", 4)
    plan, _ = engine.step()
    assert plan.scheduled()[0].request_id == "x"
    engine.shared.schedule(PACE)
    engine.shared.fail(RequestId("x"), unprepared(ValueError()))
    assert engine.prefill.load().num_running == 0
    assert engine.decode.load().num_running == 1


def test_the_load_is_that_of_both_tiers() -> None:
    engine = Engine(40)
    engine.decoding("d", 6)
    engine.prompt("p", 20)
    engine.prompt("q", 20)
    load = engine.shared.load()
    assert (load.num_running, load.num_waiting, load.total_blocks) == (0, 3, 40)
    assert load.queued_by_router == {ROUTER: 46}
    assert load.queued_prompt_tokens == 46


def test_no_step_runs_ahead_of_a_prompt_that_waits_for_its_turn() -> None:
    engine = Engine(40)
    engine.decoding("d", 4)
    engine.step()
    plan, _ = engine.step()
    assert plan.decoding
    plan = engine.shared.schedule(PACE)
    assert engine.shared.plan_ahead(plan) is not None
    engine.prompt("p", 4)
    assert engine.shared.plan_ahead(plan) is None
