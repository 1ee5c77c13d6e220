"""Cores that come and go: what is computed with them is what one thread computes, bit for bit.

Cores have numbers that no machine here has. Threads that should be pinned to them then run anywhere, and the file in
which they are lent is the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.choice import KernelOptions
from kernels.cpu.decoder import Borrowing
from pdserve.model.decoder import Decoder
from pdserve.worker.load.core_leases import CoreLeases
from tests.property.model.plans import Placement, compute, plans, random_text, whole
from tests.property.model.same import assert_same_bits
from tests.property.model.tiny_models import Fields, make_decoder, model_configs
from tests.support.backends import INSTRUCTION_SETS, native

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ kernels")

OURS, THEIRS, OTHERS = (900, 901, 902), (910, 911, 912), (920,)
PLACEMENT = Placement()
ROOT = Path(__file__).parents[3]
FIELDS: Fields = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 130,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


class LeaseFile:
    """A file of leases, and the workers that lend each other their cores in it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def worker(self, cpus: Sequence[int]) -> CoreLeases:
        """One with nothing to do."""
        leases = CoreLeases(self._path, cpus)
        leases.set_busy(False)
        return leases

    def options(
        self, cpus: tuple[int, ...], lent: tuple[int, ...], instruction_set: str | None = None
    ) -> KernelOptions:
        """What a worker on `cpus` computes with when it may borrow, however crowded the machine that tests."""
        leases = self.worker(cpus)
        borrowing = Borrowing(leases=leases.memory, borrower=leases.borrower, cpus=lent, stay_away_s=0.0)
        options = native(instruction_set or INSTRUCTION_SETS[0], num_threads=len(cpus))
        return replace(options, cpus=cpus, borrowing=borrowing)

    def borrower(self, cpu: int) -> int:
        """Who has that core now."""
        return memoryview(CoreLeases(self._path, OTHERS).memory).cast("I")[cpu * 16 + 1]


@pytest.fixture
def lease_file(tmp_path: Path) -> LeaseFile:
    """Nobody has anything to do in it, but for the test."""
    return LeaseFile(tmp_path / "cores")


@pytest.fixture(scope="module")
def restless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeaseFile]:
    """Another process wakes up and puts to sleep the owners of lent cores all the time."""
    path = tmp_path_factory.mktemp("restless") / "cores"
    command = [sys.executable, "-m", "tests.property.model.restless_owners", str(path), *map(str, THEIRS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as owners:
        assert owners.stdout is not None
        assert owners.stdout.readline() == b"ready\n"
        yield LeaseFile(path)
        owners.kill()


def borrowed_seconds(decoder: Decoder) -> float:
    assert decoder.thread_counters is not None
    return decoder.thread_counters.borrowed_core_seconds


def alone(fields: Fields, dtype: torch.dtype = torch.bfloat16, instruction_set: str | None = None) -> Decoder:
    return make_decoder(fields, native(instruction_set or INSTRUCTION_SETS[0]), dtype)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=15, deadline=None)
@given(
    fields=model_configs(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    num_own=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    data=st.data(),
)
def test_cores_that_come_and_go_in_the_middle_of_a_pass_change_nothing(
    restless: LeaseFile,
    instruction_set: str,
    fields: Fields,
    dtype: torch.dtype,
    num_own: int,
    lengths: list[int],
    data: st.DataObject,
) -> None:
    fields = fields | {"num_hidden_layers": 4}
    vocab_size = fields["vocab_size"]
    assert isinstance(vocab_size, int)
    texts = [random_text(number, length, vocab_size) for number, length in enumerate(lengths)]
    plan = data.draw(plans(lengths))
    expected = whole(alone(fields, dtype, instruction_set), texts, PLACEMENT)
    decoder = make_decoder(fields, restless.options(OURS[:num_own], THEIRS, instruction_set), dtype)
    assert_same_bits(compute(decoder, texts, plan, PLACEMENT), expected)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_long_passes_meet_every_pattern_of_lending(restless: LeaseFile, rows: int) -> None:
    texts = [random_text(1, 4 * rows, 97)]
    plan = [[(0, rows)]] * 4
    expected = compute(alone(FIELDS), texts, plan, PLACEMENT)
    decoder = make_decoder(FIELDS, restless.options(OURS, THEIRS), torch.bfloat16)
    for _ in range(8):
        assert_same_bits(compute(decoder, texts, plan, PLACEMENT), expected)
    assert borrowed_seconds(decoder) > 0


def test_idle_cores_take_part_and_are_given_back_with_the_pass(lease_file: LeaseFile) -> None:
    texts = [random_text(1, 40, 97)]
    decoder = make_decoder(FIELDS, lease_file.options(OURS[:2], THEIRS), torch.bfloat16)
    assert_same_bits(whole(decoder, texts, PLACEMENT), whole(alone(FIELDS), texts, PLACEMENT))
    assert borrowed_seconds(decoder) > 0
    assert [lease_file.borrower(cpu) for cpu in THEIRS] == [0, 0, 0]


def test_a_worker_with_work_keeps_its_core(lease_file: LeaseFile) -> None:
    decoder = make_decoder(FIELDS, lease_file.options(OURS, THEIRS), torch.bfloat16)
    for cpu in THEIRS:
        lease_file.worker([cpu]).set_busy(True)
    whole(decoder, [random_text(1, 40, 97)], PLACEMENT)
    assert borrowed_seconds(decoder) == 0


def test_a_core_that_another_has_borrowed_is_not_taken_and_stays_its_own(lease_file: LeaseFile) -> None:
    decoder = make_decoder(FIELDS, lease_file.options(OURS, THEIRS[:1]), torch.bfloat16)
    words = memoryview(lease_file.worker(THEIRS[:1]).memory).cast("I")
    words[THEIRS[0] * 16 + 1] = 77
    whole(decoder, [random_text(1, 40, 97)], PLACEMENT)
    assert (borrowed_seconds(decoder), lease_file.borrower(THEIRS[0])) == (0, 77)


def test_two_borrowers_of_one_core_take_turns(lease_file: LeaseFile) -> None:
    texts = [random_text(1, 60, 97)]
    expected = whole(alone(FIELDS), texts, PLACEMENT)
    lease_file.worker(THEIRS[:1])
    decoders = [make_decoder(FIELDS, lease_file.options((cpu,), THEIRS[:1]), torch.bfloat16) for cpu in OURS[:2]]
    failures: list[BaseException] = []

    def compute_often(decoder: Decoder) -> None:
        try:
            for _ in range(40):
                assert_same_bits(whole(decoder, texts, PLACEMENT), expected)
        except BaseException as error:  # noqa: BLE001 - the test's own thread tells it
            failures.append(error)

    started = time.monotonic()
    threads = [threading.Thread(target=compute_often, args=(decoder,)) for decoder in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    # Held by both at a time, it would have been held for longer than there was time.
    assert 0 < sum(borrowed_seconds(decoder) for decoder in decoders) <= time.monotonic() - started


def test_at_most_as_many_cores_are_borrowed_as_are_owned(lease_file: LeaseFile) -> None:
    decoder = make_decoder(FIELDS, lease_file.options(OURS[:1], THEIRS), torch.bfloat16)
    started = time.monotonic()
    for _ in range(20):
        whole(decoder, [random_text(1, 60, 97)], PLACEMENT)
    assert 0 < borrowed_seconds(decoder) <= time.monotonic() - started


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_core_on_which_others_compute_is_left_alone_though_its_owner_sleeps(lease_file: LeaseFile) -> None:
    usable = os.sched_getaffinity(0)
    crowded = min(usable)  # By ourselves: the thread there can only run while we do not.
    options = lease_file.options(OURS[:1], (crowded,))
    assert options.borrowing is not None
    decoder = make_decoder(
        FIELDS, replace(options, borrowing=replace(options.borrowing, stay_away_s=3600.0)), torch.bfloat16
    )
    texts = [random_text(1, 60, 97)]
    expected = whole(alone(FIELDS), texts, PLACEMENT)
    os.sched_setaffinity(0, {crowded})
    try:
        borrowed = -1.0
        while borrowed_seconds(decoder) != borrowed:
            borrowed = borrowed_seconds(decoder)
            assert_same_bits(whole(decoder, texts, PLACEMENT), expected)
    finally:
        os.sched_setaffinity(0, usable)
    assert borrowed > 0


def test_without_cores_of_its_own_a_worker_borrows_none(lease_file: LeaseFile) -> None:
    options = lease_file.options(OURS[:1], THEIRS)
    decoder = make_decoder(FIELDS, replace(options, num_threads=2), torch.bfloat16)
    assert decoder.kernels.borrow_cpus == ()
    assert make_decoder(FIELDS, options, torch.bfloat16).kernels.borrow_cpus == THEIRS
