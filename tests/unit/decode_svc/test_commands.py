"""Every command in every phase of a request: it is obeyed, or refused without a change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode_svc.request import DecodePhase
from decode_svc.scheduler import DecodeScheduler
from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import AttemptId
from pdserve.base.sampling import SamplingParams
from tests.unit.decode_svc.decode_worker import ALWAYS, PROMPT, A, DecodeWorker, decode, first_tokens, job, oracle
from tests.unit.engine.fakes import write_prompt

PARAMS = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True)
Command = Callable[[DecodeScheduler], object]
#: Commands that need a certain phase, with these phases.
COMMANDS: dict[str, tuple[Command, set[DecodePhase]]] = {
    "reserve": (lambda scheduler: scheduler.reserve(job(A, PROMPT, PARAMS)), {DecodePhase.OVER}),
    "activate": (
        lambda scheduler: scheduler.activate(A, first_tokens(job(A, PROMPT, PARAMS))),
        {DecodePhase.RESERVED},
    ),
    "prefill_locally": (
        lambda scheduler: scheduler.prefill_locally(A),
        {DecodePhase.WAITING, DecodePhase.RESERVED},
    ),
}


def in_phase(phase: DecodePhase) -> DecodeWorker:
    """A worker with request A, of two choices, in that phase."""
    worker = decode(max_num_batched_tokens=4)
    is_granted = phase in (DecodePhase.WAITING, DecodePhase.RESERVED)
    worker.scheduler.reserve(job(A, PROMPT, PARAMS, threshold=0 if is_granted else ALWAYS))
    match phase:
        case DecodePhase.RESERVED:
            write_prompt(worker.cache, worker.grant(A).block_tables[0], 0, PROMPT)
        case DecodePhase.COMPUTING:
            worker.step()
        case DecodePhase.RUNNING:
            while not worker.reported.get(A):
                worker.step()
        case DecodePhase.OVER:
            worker.run()
    return worker


ILLEGAL = [(phase, name) for phase in DecodePhase for name in COMMANDS if phase not in COMMANDS[name][1]]
LEGAL = [(phase, name) for phase in DecodePhase for name in COMMANDS if phase in COMMANDS[name][1]]


@pytest.mark.parametrize(("phase", "name"), ILLEGAL)
def test_a_command_that_the_phase_does_not_allow_is_refused_and_changes_nothing(phase: DecodePhase, name: str) -> None:
    worker = in_phase(phase)
    before = worker.scheduler.load()
    match = "already on this worker" if name == "reserve" else "not on this worker"
    with pytest.raises(
        InvalidTransition, match=match if name == "reserve" or phase is DecodePhase.OVER else phase.value
    ):
        COMMANDS[name][0](worker.scheduler)
    worker.scheduler.check_integrity()
    assert worker.scheduler.load() == before
    worker.scheduler.abort(A)
    assert worker.all_free


@pytest.mark.parametrize(("phase", "name"), LEGAL)
def test_after_a_command_that_the_phase_allows_the_request_gets_its_tokens(phase: DecodePhase, name: str) -> None:
    worker = in_phase(phase)
    worker.reported.clear()
    COMMANDS[name][0](worker.scheduler)
    worker.scheduler.check_integrity()
    if name == "reserve":
        write_prompt(worker.cache, worker.grant(A).block_tables[0], 2, PROMPT)
        worker.scheduler.activate(A, first_tokens(job(A, PROMPT, PARAMS)))
    worker.run()
    start = 0 if name == "prefill_locally" else 1
    assert [worker.tokens(A, choice) for choice in range(2)] == [
        oracle(PROMPT, PARAMS, choice)[start:] for choice in range(2)
    ]
    assert worker.all_free


@pytest.mark.parametrize("phase", DecodePhase)
def test_abort_frees_everything_in_every_phase(phase: DecodePhase) -> None:
    worker = in_phase(phase)
    assert worker.scheduler.abort(A) is (phase is not DecodePhase.OVER)
    worker.scheduler.check_integrity()
    assert worker.all_free
    assert not worker.scheduler.abort(A)
    assert not worker.scheduler.has_work()


def test_abort_frees_a_request_with_a_preempted_choice() -> None:
    worker = decode(6, max_num_batched_tokens=4)
    worker.scheduler.reserve(job(A, PROMPT, PARAMS, threshold=ALWAYS))
    while not worker.step().preempted:
        assert worker.scheduler.has_work()
    assert worker.scheduler.abort(A)
    worker.scheduler.check_integrity()
    assert worker.all_free
    assert not worker.scheduler.has_work()


@pytest.mark.parametrize("phase", DecodePhase)
def test_stopping_every_choice_ends_the_request_unless_a_transfer_may_write_to_its_blocks(phase: DecodePhase) -> None:
    worker = in_phase(phase)
    for choice in range(2):
        worker.scheduler.stop_choice(A, choice)
    worker.scheduler.check_integrity()
    assert worker.all_free is (phase is not DecodePhase.RESERVED)
    if phase is DecodePhase.RESERVED:
        worker.scheduler.activate(A, first_tokens(job(A, PROMPT, PARAMS)))
        assert worker.all_free
    num_reports = len(worker.reported.get(A, {}))
    worker.run()
    assert [each.request_id for events in worker.seen for each in events.finished] == [A]
    assert len(worker.reported.get(A, {})) == num_reports


def test_an_aborted_request_has_no_more_events_so_its_id_can_be_used_again() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.step()
    worker.scheduler.stop_choice(A, 0)
    assert not worker.scheduler.abort(A)
    worker.deliver(job(A, PROMPT[:5]))
    worker.run()
    assert [each.request_id for events in worker.seen for each in events.finished] == [A]
    assert worker.all_free


def test_a_stopped_choice_frees_its_blocks_and_the_others_continue() -> None:
    worker = decode()
    params = SamplingParams(n=2, seed=11, max_tokens=9, ignore_eos=True)
    worker.deliver(job(A, PROMPT, params))
    worker.step()
    worker.scheduler.stop_choice(A, 0)
    worker.scheduler.check_integrity()
    events = worker.run()
    assert len(worker.tokens(A, 0)) == 1
    assert worker.tokens(A, 1) == oracle(PROMPT, params, 1)[1:]
    assert events[-1].finished == (AttemptId(A, 0),)


def test_stopping_the_last_choice_ends_the_request() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.step()
    worker.scheduler.stop_choice(A, 0)
    worker.scheduler.stop_choice(A, 0)
    assert worker.all_free
    assert [events.finished for events in worker.run()] == [(AttemptId(A, 0),)]


def test_a_choice_stopped_before_its_kv_arrived_never_runs() -> None:
    worker = decode()
    params = SamplingParams(n=2, seed=11, max_tokens=9, ignore_eos=True)
    worker.scheduler.reserve(job(A, PROMPT, params))
    grant = worker.grant(A)
    worker.scheduler.stop_choice(A, 1)
    write_prompt(worker.cache, grant.block_tables[0], 0, PROMPT)
    worker.scheduler.activate(A, first_tokens(job(A, PROMPT, params)))
    worker.run()
    assert set(worker.reported[A]) == {0}
    assert worker.all_free


def test_a_stopped_request_keeps_its_granted_blocks_until_its_reservation_ends() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    worker.grant(A)
    worker.scheduler.stop_choice(A, 0)
    assert not worker.all_free
    worker.scheduler.activate(A, [1])
    assert worker.all_free
    assert [events.finished for events in worker.run()] == [(AttemptId(A, 0),)]


@pytest.mark.parametrize("is_computing", [False, True])
def test_stopping_all_choices_before_the_first_token_ends_the_request(is_computing: bool) -> None:
    worker = decode(max_num_batched_tokens=4)
    worker.scheduler.reserve(job(A, PROMPT, threshold=ALWAYS))
    if is_computing:
        worker.step()
    worker.scheduler.stop_choice(A, 0)
    assert worker.all_free
    assert [events.finished for events in worker.run()] == [(AttemptId(A, 0),)]


def test_stopping_an_unknown_request_or_choice_changes_nothing() -> None:
    worker = decode()
    worker.scheduler.stop_choice(A, 0)
    worker.deliver(job(A, PROMPT))
    worker.scheduler.stop_choice(A, 5)
    worker.run()
    assert worker.tokens(A) == oracle(PROMPT)[1:]
