"""Cores that are lent and taken back during a pass: the results are those of one thread, bit for bit.

The tests use CPU numbers that no machine has. Threads cannot be pinned to them and run on any CPU, but the file of
leases works the same.

Only `PDSERVE_TEST_DEPTH=full` runs all examples of the first test on all instruction sets. Without it, the best one
gets 9 of 15, sets between that and `portable` 5 and `portable` 10, because all sets share the code that divides work.
"""

from __future__ import annotations

import os
import signal
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
from tests.support.depth import examples_on

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
    """A file of leases, in which workers lend each other cores."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def worker(self, cpus: Sequence[int]) -> CoreLeases:
        """The leases of an idle worker."""
        leases = CoreLeases(self._path, cpus)
        leases.set_busy(False)
        return leases

    def options(
        self, cpus: tuple[int, ...], lent: tuple[int, ...], instruction_set: str | None = None
    ) -> KernelOptions:
        """The options of a worker on `cpus` that may borrow the CPUs `lent`, even on a busy test machine."""
        leases = self.worker(cpus)
        borrowing = Borrowing(leases=leases.memory, borrower=leases.borrower, cpus=lent, stay_away_s=0.0)
        options = native(instruction_set or INSTRUCTION_SETS[0], num_threads=len(cpus))
        return replace(options, cpus=cpus, borrowing=borrowing)

    def borrower(self, cpu: int) -> int:
        """The id of the current borrower of that core."""
        return memoryview(CoreLeases(self._path, OTHERS).memory).cast("I")[cpu * 16 + 1]


@pytest.fixture
def lease_file(tmp_path: Path) -> LeaseFile:
    """A file that only the test uses."""
    return LeaseFile(tmp_path / "cores")


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LeaseFile, subprocess.Popen[bytes]]]:
    """Another process, stopped, and the file in which it constantly marks the owners of lent cores busy and idle."""
    path = tmp_path_factory.mktemp("restless") / "cores"
    command = [sys.executable, "-m", "tests.property.model.restless_owners", str(path), *map(str, THEIRS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as owners:
        assert owners.stdout is not None
        assert owners.stdout.readline() == b"ready\n"
        owners.send_signal(signal.SIGSTOP)
        yield LeaseFile(path), owners
        owners.kill()


@pytest.fixture
def restless(owners: tuple[LeaseFile, subprocess.Popen[bytes]]) -> Iterator[LeaseFile]:
    """The file while that process runs, which takes a whole core from other tests."""
    file, process = owners
    process.send_signal(signal.SIGCONT)
    yield file
    process.send_signal(signal.SIGSTOP)


def borrowed_seconds(decoder: Decoder) -> float:
    assert decoder.thread_counters is not None
    return decoder.thread_counters.borrowed_core_seconds


def alone(fields: Fields, dtype: torch.dtype = torch.bfloat16, instruction_set: str | None = None) -> Decoder:
    return make_decoder(fields, native(instruction_set or INSTRUCTION_SETS[0]), dtype)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_cores_lent_and_taken_back_during_a_pass_change_nothing(restless: LeaseFile, instruction_set: str) -> None:
    @settings(max_examples=examples_on(instruction_set, 15))
    @given(
        fields=model_configs(),
        dtype=st.sampled_from([torch.bfloat16, torch.float32]),
        num_own=st.integers(1, 3),
        lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
        data=st.data(),
    )
    def check(fields: Fields, dtype: torch.dtype, num_own: int, lengths: list[int], data: st.DataObject) -> None:
        fields = fields | {"num_hidden_layers": 4}
        vocab_size = fields["vocab_size"]
        assert isinstance(vocab_size, int)
        texts = [random_text(number, length, vocab_size) for number, length in enumerate(lengths)]
        plan = data.draw(plans(lengths))
        expected = whole(alone(fields, dtype, instruction_set), texts, PLACEMENT)
        decoder = make_decoder(fields, restless.options(OURS[:num_own], THEIRS, instruction_set), dtype)
        assert_same_bits(compute(decoder, texts, plan, PLACEMENT), expected)

    check()


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_changing_leases_do_not_change_long_passes(restless: LeaseFile, rows: int) -> None:
    texts = [random_text(1, 4 * rows, 97)]
    plan = [[(0, rows)]] * 4
    expected = compute(alone(FIELDS), texts, plan, PLACEMENT)
    decoder = make_decoder(FIELDS, restless.options(OURS, THEIRS), torch.bfloat16)
    for _ in range(8):
        assert_same_bits(compute(decoder, texts, plan, PLACEMENT), expected)
    assert borrowed_seconds(decoder) > 0


def test_idle_cores_are_borrowed_and_returned_at_the_end_of_a_pass(lease_file: LeaseFile) -> None:
    texts = [random_text(1, 40, 97)]
    decoder = make_decoder(FIELDS, lease_file.options(OURS[:2], THEIRS), torch.bfloat16)
    assert_same_bits(whole(decoder, texts, PLACEMENT), whole(alone(FIELDS), texts, PLACEMENT))
    assert borrowed_seconds(decoder) > 0
    assert [lease_file.borrower(cpu) for cpu in THEIRS] == [0, 0, 0]


def test_a_busy_worker_keeps_its_cores(lease_file: LeaseFile) -> None:
    decoder = make_decoder(FIELDS, lease_file.options(OURS, THEIRS), torch.bfloat16)
    for cpu in THEIRS:
        lease_file.worker([cpu]).set_busy(True)
    whole(decoder, [random_text(1, 40, 97)], PLACEMENT)
    assert borrowed_seconds(decoder) == 0


def test_a_core_borrowed_by_another_worker_is_not_taken(lease_file: LeaseFile) -> None:
    decoder = make_decoder(FIELDS, lease_file.options(OURS, THEIRS[:1]), torch.bfloat16)
    words = memoryview(lease_file.worker(THEIRS[:1]).memory).cast("I")
    words[THEIRS[0] * 16 + 1] = 77
    whole(decoder, [random_text(1, 40, 97)], PLACEMENT)
    assert (borrowed_seconds(decoder), lease_file.borrower(THEIRS[0])) == (0, 77)


def test_two_borrowers_of_one_core_alternate(lease_file: LeaseFile) -> None:
    texts = [random_text(1, 60, 97)]
    expected = whole(alone(FIELDS), texts, PLACEMENT)
    lease_file.worker(THEIRS[:1])
    decoders = [make_decoder(FIELDS, lease_file.options((cpu,), THEIRS[:1]), torch.bfloat16) for cpu in OURS[:2]]
    failures: list[BaseException] = []

    def compute_often(decoder: Decoder) -> None:
        try:
            for _ in range(40):
                assert_same_bits(whole(decoder, texts, PLACEMENT), expected)
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            failures.append(error)

    started = time.monotonic()
    threads = [threading.Thread(target=compute_often, args=(decoder,)) for decoder in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    # If both held it at once, it would have been held for longer than the time that passed.
    assert 0 < sum(borrowed_seconds(decoder) for decoder in decoders) <= time.monotonic() - started


def test_no_more_cores_are_borrowed_than_owned(lease_file: LeaseFile) -> None:
    decoder = make_decoder(FIELDS, lease_file.options(OURS[:1], THEIRS), torch.bfloat16)
    started = time.monotonic()
    for _ in range(20):
        whole(decoder, [random_text(1, 60, 97)], PLACEMENT)
    assert 0 < borrowed_seconds(decoder) <= time.monotonic() - started


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_core_in_use_by_others_is_not_borrowed_although_its_owner_is_idle(lease_file: LeaseFile) -> None:
    usable = os.sched_getaffinity(0)
    crowded = min(usable)  # The main thread is pinned to it, so the borrower's thread only runs when that waits.
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


def test_a_worker_without_pinned_cores_borrows_none(lease_file: LeaseFile) -> None:
    options = lease_file.options(OURS[:1], THEIRS)
    decoder = make_decoder(FIELDS, replace(options, num_threads=2), torch.bfloat16)
    assert decoder.kernels.borrow_cpus == ()
    assert make_decoder(FIELDS, options, torch.bfloat16).kernels.borrow_cpus == THEIRS
