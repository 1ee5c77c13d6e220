"""A rank that cannot do its part keeps the worker from starting, with a reason, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
import torch

from pdserve.base.errors import PeerLost, SetupError
from pdserve.engine.graphs import DeviceDecoder
from pdserve.worker.ranks import processes
from pdserve.worker.ranks import rank_group as rank_groups
from pdserve.worker.ranks.messages import MessageKind, encode
from pdserve.worker.ranks.rank_group import RankGroup
from pdserve.worker.ranks.shared_stage import make_stage
from pdserve.worker.ranks.startup import RankSetup
from pdserve.worker.serve.loaded_model import load_model
from prefill_svc.config import PrefillConfig
from tests.unit.model.tiny import save_model
from tests.unit.worker.ranks import failing_follower

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert followers() == []


def followers() -> list[psutil.Process]:
    """Of this process, which may have other children: clusters that other tests share."""
    modules = {processes._MODULE, failing_follower.__name__, "pdserve.worker.ranks.follower"}
    return [child for child in psutil.Process().children() if modules & set(child.cmdline())]


def config_of(model: Path, size: int = 2) -> PrefillConfig:
    return PrefillConfig(
        model=str(model), redis_url="", tensor_parallel_size=size, kv_cache_memory=1 << 20, staging_memory=1 << 16
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("ends-at-once", r"Rank 1 \(cpu\): ended with exit code 7 while it was started"),
        ("cannot-load", r"Rank 1 \(cpu\): no memory"),
        ("cannot-agree", r"Rank 1 \(cpu\): no room for one block"),
        ("is-lost-among-others", "The ranks do not work together: .*"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    with pytest.raises(SetupError, match=reason):
        load_model(config_of(save_model(tmp_path / how)))


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "_END_S", 0.2)
    RankGroup(config_of(save_model(tmp_path / "never-ends")), CPU).close()


def test_a_rank_that_says_nothing_more_and_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "_END_S", 0.2)
    with pytest.raises(SetupError, match=r"Rank 1 \(cpu\): ended with exit code -9"):
        load_model(config_of(save_model(tmp_path / "says-nothing-more")))


def test_ranks_have_one_deadline_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "_END_S", 1.0)
    monkeypatch.setattr(processes, "_REASON_S", 1.0)
    model = save_model(tmp_path / "never-ends", {"num_key_value_heads": 4, "num_attention_heads": 8})
    team = RankGroup(config_of(model, 4), CPU)
    started = time.monotonic()
    assert team._others.complaint() is None
    team.close()
    # Each for itself would take three seconds, twice.
    assert 2.0 <= time.monotonic() - started < 4.0


def test_a_model_that_cannot_be_split_is_told_before_any_rank_is_started(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"3 ranks cannot split .* Sizes that work: 1, 2"):
        load_model(config_of(save_model(tmp_path), 3))


def test_without_a_temporary_directory_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "read-only"))
    with pytest.raises(SetupError, match=r"temporary directory, which cannot be made: .* TMPDIR"):
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


def test_a_lost_rank_is_told_to_who_watches_then_or_later(tmp_path: Path) -> None:
    loaded = load_model(config_of(save_model(tmp_path)))
    assert loaded.team is not None
    told: SimpleQueue[Exception] = SimpleQueue()
    loaded.team.watch(told.put)
    [follower] = followers()
    follower.kill()
    error = told.get(timeout=20)
    assert str(error) == "rank 1 (cpu) of this worker ended with exit code -9"
    loaded.team.watch(told.put)
    assert told.get(timeout=0) is error
    loaded.close()


class StuckGroup:
    """A group on GPUs, whose end takes for ever."""

    def __init__(self) -> None:
        self.aborting = threading.Event()
        self.may_return = threading.Event()

    def abort(self) -> None:
        self.aborting.set()
        assert self.may_return.wait(20)


def test_a_lost_rank_on_a_gpu_is_told_before_others_are_let_go_of_and_ends_the_worker_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    monkeypatch.setattr(rank_groups, "_END_S", 0.2)
    events: SimpleQueue[object] = SimpleQueue()
    monkeypatch.setattr("os._exit", events.put)
    team = RankGroup(config_of(save_model(tmp_path / "never-ends")), CPU)
    group = StuckGroup()
    monkeypatch.setattr(team, "_device", torch.device("cuda"))
    monkeypatch.setattr(team, "_group", group)

    def on_lost(error: Exception) -> None:
        assert not group.aborting.is_set()
        with pytest.raises(PeerLost):  # So a step that ends from now on tells nothing.
            team.lead.note_end()
        events.put(error)

    team.watch(on_lost)
    [follower] = followers()
    follower.kill()
    assert isinstance(events.get(timeout=20), PeerLost)
    assert group.aborting.wait(20)
    assert events.get(timeout=20) == 1
    group.may_return.set()
    team.close()


@contextmanager
def started(model: Path) -> Iterator[processes.RankProcess]:
    config = config_of(save_model(model))
    stage = make_stage(config.staging_memory)
    follower = processes.RankProcess(1, stage, "cpu")
    follower.order(RankSetup(rank=1, name="rank-1", rendezvous=str(model / "nobody-comes"), config=config))
    follower.expect("here")
    yield follower
    follower.close()
    follower.end(0.0)
    os.close(stage)


async def test_an_answer_to_something_else_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    with started(tmp_path / "answers-another") as follower:
        with pytest.raises(AssertionError, match="something else"):
            await follower.ask(encode(MessageKind.WRITE_BLOCKS, 7))
        follower.close()
        await asyncio.sleep(0)  # The transport closes its socket then.


def test_a_rank_ends_soon_after_its_worker_also_while_it_waits_for_others(tmp_path: Path) -> None:
    with started(tmp_path) as follower:
        follower.close()
        # Whom it waits for would have a minute.
        assert follower.process.wait(20) != 0


def test_graphs_go_before_the_group_which_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_groups, "_GROUP_END_S", 0.2)
    team = RankGroup(config_of(save_model(tmp_path)), CPU)
    part = team.load()
    group = StuckGroup()
    there: list[bool] = []
    decoder = DeviceDecoder(part.decoder, CPU)
    monkeypatch.setattr(decoder, "drop_graphs", lambda: there.append(not group.aborting.is_set()))
    monkeypatch.setattr(team, "_part", replace(part, step_decoder=decoder))
    monkeypatch.setattr(team, "_device", torch.device("cuda"))
    monkeypatch.setattr(team, "_group", group)
    team.close()
    assert group.aborting.is_set()
    assert there == [True]
    group.may_return.set()


def test_a_rank_that_knows_what_went_wrong_is_heard_before_those_that_only_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    model = save_model(tmp_path / "cannot-agree", {"num_key_value_heads": 4, "num_attention_heads": 8})
    with pytest.raises(SetupError, match=r"^Rank 3 \(cpu\): no room for one block$"):
        load_model(config_of(model, 4))


def test_a_rank_that_fails_is_heard_while_others_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "_END_S", 1.0)
    config = config_of(save_model(tmp_path / "last-fails"), 3)
    stage = make_stage(1)
    others = processes.RankProcesses(config, stage, tmp_path / "nobody-comes", lambda error: None)
    others.expect("here")
    with pytest.raises(SetupError, match=r"^Rank 2 \(cpu\): ended with exit code 7"):
        others.expect("ready")
    others.close()
    os.close(stage)


def test_an_error_of_the_first_rank_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    monkeypatch.setattr(processes, "_REASON_S", 0.1)

    def fail(*_: object, **__: object) -> None:
        raise SetupError("no memory")

    monkeypatch.setattr(rank_groups, "load_shard", fail)
    with pytest.raises(SetupError, match=r"^Rank 0 \(cpu\): no memory$"):
        load_model(config_of(save_model(tmp_path / "is-lost-among-others")))


def test_ranks_are_named_with_their_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MODULE", failing_follower.__name__)
    config = replace(config_of(save_model(tmp_path / "cannot-load"), 3), device="cuda:2")
    stage = make_stage(1)
    others = processes.RankProcesses(config, stage, tmp_path / "nobody-comes", lambda error: None)
    with pytest.raises(SetupError, match=r"^Rank (1 \(cuda:3\)|2 \(cuda:4\)): no memory$"):
        others.expect("here")
    others.close()
    os.close(stage)
