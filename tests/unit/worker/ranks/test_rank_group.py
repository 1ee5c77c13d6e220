"""A rank that fails keeps the worker from starting, with a reason, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import torch

from pdserve.base.errors import PeerLost, SetupError
from pdserve.engine.graphs import DeviceDecoder
from pdserve.worker.ranks import processes
from pdserve.worker.ranks import rank_group as rank_groups
from pdserve.worker.ranks.messages import MessageKind, encode
from pdserve.worker.ranks.processes import RankProcess, RankProcesses
from pdserve.worker.ranks.rank_group import RankGroup
from pdserve.worker.ranks.shared_stage import make_stage
from pdserve.worker.ranks.startup import RankSetup, SetupState
from pdserve.worker.serve.loaded_model import load_model
from prefill_svc.config import PrefillConfig
from tests.unit.model.tiny import save_model
from tests.unit.worker.ranks import failing_follower

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    assert followers() == []


def followers() -> list[psutil.Process]:
    """The followers among this process's children, which may include clusters that other tests share."""
    modules = {processes.FOLLOWER_MODULE, failing_follower.__name__, "pdserve.worker.ranks.follower"}
    return [child for child in psutil.Process().children() if modules & set(child.cmdline())]


def config_of(model: Path, size: int = 2) -> PrefillConfig:
    return PrefillConfig(
        model=str(model), redis_url="", tensor_parallel_size=size, kv_cache_memory=1 << 20, staging_memory=1 << 16
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exits-at-once", r"Rank 1 \(cpu\): ended with exit code 7 while starting"),
        ("cannot-load", r"Rank 1 \(cpu\): no memory"),
        ("cannot-agree", r"Rank 1 \(cpu\): no memory for one block"),
        ("exits-while-joining", "The ranks cannot communicate: .*"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    with pytest.raises(SetupError, match=reason):
        load_model(config_of(save_model(tmp_path / how)))


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "END_S", 0.2)
    RankGroup(config_of(save_model(tmp_path / "never-ends")), CPU).close()


def test_a_rank_that_closes_its_socket_and_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "END_S", 0.2)
    with pytest.raises(SetupError, match=r"Rank 1 \(cpu\): ended with exit code -9"):
        load_model(config_of(save_model(tmp_path / "closes-its-socket")))


def test_all_ranks_share_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    model = save_model(tmp_path / "never-ends", {"num_key_value_heads": 4, "num_attention_heads": 8})
    ranks = RankGroup(config_of(model, 4), CPU)
    deadlines: dict[str, set[float]] = {"complaint": set(), "end": set()}

    def complaint(_: processes.RankProcess, deadline: float) -> None:
        deadlines["complaint"].add(deadline)

    def end(follower: processes.RankProcess, deadline: float) -> int:
        deadlines["end"].add(deadline)
        follower.process.kill()
        return follower.process.wait()

    monkeypatch.setattr(processes.RankProcess, "complaint", complaint)
    monkeypatch.setattr(processes.RankProcess, "end", end)
    assert ranks._followers.complaint() is None
    ranks.close()
    assert [len(different) for different in deadlines.values()] == [1, 1]


def test_a_model_that_cannot_be_split_is_refused_before_any_rank_is_started(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"3 ranks cannot split .* Sizes that work: 1, 2"):
        load_model(config_of(save_model(tmp_path), 3))


def test_without_a_temporary_directory_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "read-only"))
    with pytest.raises(SetupError, match=r"Cannot create the temporary directory .* Set TMPDIR"):
        load_model(config_of(save_model(tmp_path)))


def test_quantized_weights_are_refused_with_several_ranks(tmp_path: Path) -> None:
    config = PrefillConfig(
        model=str(save_model(tmp_path)),
        redis_url="",
        tensor_parallel_size=2,
        quantization="int8",
        staging_memory=1 << 16,
    )
    with pytest.raises(SetupError, match=r"int8 needs the C\+\+ kernels: 2 ranks share the model"):
        load_model(config)


def test_a_lost_rank_is_reported_to_present_and_later_watchers(tmp_path: Path) -> None:
    loaded = load_model(config_of(save_model(tmp_path)))
    assert loaded.rank_group is not None
    reported: SimpleQueue[Exception] = SimpleQueue()
    loaded.rank_group.watch(reported.put)
    [follower] = followers()
    follower.kill()
    error = reported.get(timeout=20)
    assert str(error) == "rank 1 (cpu) of this worker ended with exit code -9"
    loaded.rank_group.watch(reported.put)
    assert reported.get(timeout=0) is error
    assert loaded.rank_group.was_ended()
    loaded.close()


@pytest.mark.parametrize(
    ("codes", "was_ended"),
    [
        ([-9, 1], True),
        ([1, -9], True),
        ([-15, None], True),
        ([-11, 1], False),
        ([1, -6], False),
        ([1, 1], False),
        ([None, None], False),
    ],
)
def test_a_signal_of_its_own_or_an_exception_is_a_rank_s_own_failure(codes: list[int | None], was_ended: bool) -> None:
    """Exit codes of ranks 1 and 2; None: it still runs. An exception may follow from the end of another rank."""

    class Process:
        def __init__(self, code: int | None) -> None:
            self.code = code

        def wait(self, timeout: float) -> int:
            if self.code is None:
                raise subprocess.TimeoutExpired("rank", timeout)
            return self.code

    ranks = RankProcesses.__new__(RankProcesses)
    ranks._all = [cast(RankProcess, SimpleNamespace(process=Process(code))) for code in codes]
    assert ranks.were_ended() is was_ended


class StuckGroup:
    """A group on GPUs that does not end."""

    def __init__(self) -> None:
        self.aborting = threading.Event()
        self.may_return = threading.Event()

    def abort(self) -> None:
        self.aborting.set()
        assert self.may_return.wait(20)


def test_a_lost_rank_on_a_gpu_is_reported_before_the_group_is_aborted_and_finally_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    monkeypatch.setattr(rank_groups, "END_S", 0.2)
    events: SimpleQueue[object] = SimpleQueue()
    monkeypatch.setattr("os._exit", events.put)
    ranks = RankGroup(config_of(save_model(tmp_path / "never-ends")), CPU)
    group = StuckGroup()
    monkeypatch.setattr(ranks, "_device", torch.device("cuda"))
    monkeypatch.setattr(ranks, "_group", group)

    def on_lost(error: Exception) -> None:
        assert not group.aborting.is_set()
        with pytest.raises(PeerLost):  # So a step that ends from now on reports nothing.
            ranks.rank0.record_end()
        events.put(error)

    ranks.watch(on_lost)
    [follower] = followers()
    follower.kill()
    assert isinstance(events.get(timeout=20), PeerLost)
    assert group.aborting.wait(20)
    assert events.get(timeout=20) == 1
    group.may_return.set()
    ranks.close()


@contextmanager
def started(model: Path) -> Iterator[processes.RankProcess]:
    config = config_of(save_model(model))
    stage = make_stage(config.staging_memory)
    follower = processes.RankProcess(1, stage, "cpu")
    follower.set_up(RankSetup(rank=1, name="rank-1", rendezvous=str(model / "no-other-rank-joins"), config=config))
    follower.expect(SetupState.STARTED)
    yield follower
    follower.close()
    follower.end(0.0)
    os.close(stage)


async def test_a_reply_to_another_request_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    with started(tmp_path / "replies-to-another") as follower:
        with pytest.raises(AssertionError, match="replied to another request"):
            await follower.request_copy(encode(MessageKind.WRITE_BLOCKS, 7))
        follower.close()
        await asyncio.sleep(0)  # The transport closes its socket in the next turn of the loop.


def test_a_rank_ends_soon_after_its_worker_even_while_it_waits_for_others(tmp_path: Path) -> None:
    with started(tmp_path) as follower:
        follower.close()
        # Its wait for the others would last a minute.
        assert follower.process.wait(20) != 0


def test_graphs_are_freed_before_the_group_ends_and_a_stuck_group_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_groups, "GROUP_END_S", 0.2)
    ranks = RankGroup(config_of(save_model(tmp_path)), CPU)
    shard = ranks.load()
    group = StuckGroup()
    before_abort: list[bool] = []
    decoder = DeviceDecoder(shard.decoder, CPU)
    monkeypatch.setattr(decoder, "drop_graphs", lambda: before_abort.append(not group.aborting.is_set()))
    monkeypatch.setattr(ranks, "_shard", replace(shard, step_decoder=decoder))
    monkeypatch.setattr(ranks, "_device", torch.device("cuda"))
    monkeypatch.setattr(ranks, "_group", group)
    ranks.close()
    assert group.aborting.is_set()
    assert before_abort == [True]
    group.may_return.set()


def test_the_rank_that_knows_the_cause_is_reported_rather_than_those_that_see_its_consequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    model = save_model(tmp_path / "cannot-agree", {"num_key_value_heads": 4, "num_attention_heads": 8})
    with pytest.raises(SetupError, match=r"^Rank 3 \(cpu\): no memory for one block$"):
        load_model(config_of(model, 4))


def test_a_rank_that_fails_is_reported_while_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "END_S", 1.0)
    config = config_of(save_model(tmp_path / "last-fails"), 3)
    stage = make_stage(1)
    followers = processes.RankProcesses(config, stage, tmp_path / "no-other-rank-joins", lambda error: None)
    followers.expect(SetupState.STARTED)
    with pytest.raises(SetupError, match=r"^Rank 2 \(cpu\): ended with exit code 7"):
        followers.expect(SetupState.READY)
    followers.close()
    os.close(stage)


def test_an_error_of_rank_0_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "REASON_S", 0.1)

    def fail(*_: object, **__: object) -> None:
        raise SetupError("no memory")

    monkeypatch.setattr(rank_groups, "load_shard", fail)
    with pytest.raises(SetupError, match=r"^Rank 0 \(cpu\): no memory$"):
        load_model(config_of(save_model(tmp_path / "exits-while-joining")))


def test_ranks_are_named_with_their_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FOLLOWER_MODULE", failing_follower.__name__)
    config = replace(config_of(save_model(tmp_path / "cannot-load"), 3), device="cuda:2")
    stage = make_stage(1)
    followers = processes.RankProcesses(config, stage, tmp_path / "no-other-rank-joins", lambda error: None)
    with pytest.raises(SetupError, match=r"^Rank (1 \(cuda:3\)|2 \(cuda:4\)): no memory$"):
        followers.expect(SetupState.STARTED)
    followers.close()
    os.close(stage)
