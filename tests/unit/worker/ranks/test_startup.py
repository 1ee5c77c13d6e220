"""A follower gets its worker's settings, and each rank derives its own share from them."""

from __future__ import annotations

import socket
from dataclasses import asdict, replace

import pytest

from decode_svc.config import DecodeConfig
from pdserve.base.errors import SetupError
from pdserve.worker.config import WorkerConfig
from pdserve.worker.ranks.split import config_of_rank
from pdserve.worker.ranks.startup import FollowerConfig, RankSetup, SetupReply, SetupState, receive_line, send_line

PASSWORD = "the-password"
CONFIG = DecodeConfig(
    model="/model",
    redis_url=f"redis://:{PASSWORD}@host",
    tensor_parallel_size=2,
    cpus=(0, 2, 4),
    kv_cache_memory=1 << 30,
    max_num_seqs=17,
)


def test_a_setup_arrives_with_every_setting_except_the_redis_url() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            send_line(ours, RankSetup(rank=1, name="r", rendezvous="/tmp/r", config=CONFIG).to_json())
            ours.sendall(b"left for the next reader")
        message = receive_line(theirs)
        assert message is not None
        assert PASSWORD not in str(message)
        setup = RankSetup.from_json(message)
        assert theirs.recv(100) == b"left for the next reader"
        assert receive_line(theirs) is None
    assert (setup.rank, setup.name, setup.rendezvous) == (1, "r", "/tmp/r")
    mine = asdict(setup.config)
    for name in WorkerConfig.__dataclass_fields__:
        assert mine[name] == ("" if name == "redis_url" else getattr(CONFIG, name)), name
    assert setup.config.max_decoding == CONFIG.max_decoding == 17


def test_a_reply_arrives_as_it_was_sent() -> None:
    reply = SetupReply(state=SetupState.FAILED, error="no", is_consequence=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_line(ours, reply.to_json())
        line = receive_line(theirs)
        assert line is not None
        assert SetupReply.from_json(line) == reply


def test_a_line_that_does_not_arrive_is_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        receive_line(theirs, timeout_s=0.01)


def share(rank: int, num_cores: int = 8, **changes: object) -> tuple[str, tuple[int, ...], int | None]:
    config = config_of_rank(replace(CONFIG, **changes), rank, num_cores=num_cores)  # type: ignore[arg-type]
    return config.device, config.cpus, config.threads


def test_ranks_have_cores_of_their_own_if_there_are_enough() -> None:
    assert [share(rank) for rank in range(2)] == [("cpu", (0, 2), 1), ("cpu", (4,), 1)]
    assert share(1, threads=6) == ("cpu", (4,), 3)
    assert share(1, cpus=(3,)) == ("cpu", (), 1)
    assert share(0, cpus=()) == ("cpu", (), 4)
    assert share(0, cpus=(), num_cores=1) == ("cpu", (), 1)


def test_ranks_have_consecutive_gpus() -> None:
    assert [share(rank, device="cuda")[0] for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [share(rank, device="cuda:2")[0] for rank in range(2)] == ["cuda:2", "cuda:3"]


def test_one_rank_keeps_its_settings() -> None:
    alone = FollowerConfig(model="/model", redis_url="", cpus=(1,), borrow_cpus=(2,), core_leases="/leases")
    assert config_of_rank(alone, 0, num_cores=8) is alone


def test_ranks_neither_lend_nor_borrow_cores() -> None:
    with pytest.raises(SetupError, match="support one rank only, and --tensor-parallel-size is 2"):
        config_of_rank(replace(CONFIG, core_leases="/leases"), 0, num_cores=8)
