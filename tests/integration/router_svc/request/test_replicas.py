"""Where routers have blocks copied, and that a request goes on where its copies are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.workers import Tier, WorkerLoad
from pdserve.v1 import decode_pb2
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import TEXT, after_first_token, both
from tests.integration.router_svc.script import Context, vanish
from tests.support.redis import eventually

MANY: dict[str, Tier] = {"prefill-0": "prefill", **{f"decode-{index}": "decode" for index in range(5)}}


def wants_replica(cluster: ScriptedCluster, *, failed_epoch: int | None = None) -> Callable[[Context], Awaitable[None]]:
    """The worker asks where blocks go, and has an answer then. Without an epoch, the last answer has failed it."""

    async def ask(stream: Any) -> None:
        replicas = cluster.calls.replicas
        failed = replicas[-1].epoch if failed_epoch is None else failed_epoch
        count = len(replicas)
        wanted = decode_pb2.ReplicaWanted(failed_epoch=failed)
        await stream.write(decode_pb2.DecodeResponse(replica_wanted=wanted))
        await cluster.calls.until(lambda: len(replicas) > count)

    return ask


async def test_a_request_goes_on_where_its_copies_are(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, MANY) as cluster:
        ask = after_first_token(cluster, wants_replica(cluster, failed_epoch=0))
        cluster.script.fail("decode_token", None, both(both(ask, wants_replica(cluster)), vanish))
        text, _ = await cluster.stream()
        assert text == TEXT
        first, second = cluster.calls.replicas
        record = await cluster.only_trace()
        before, after = [each for each in record["decisions"] if each["tier"] == "decode"]
        assert len({before["worker"], first.worker_id, second.worker_id}) == 3
        assert after["worker"] == second.worker_id
        assert "copies" in after["why"]
        assert cluster.workers[second.worker_id].record.epoch == second.epoch
        assert cluster.workers[second.worker_id].record.grpc_address == second.grpc_address


async def test_a_worker_that_is_full_gets_neither_copies_nor_their_request(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, MANY) as cluster:
        for worker_id in ("decode-1", "decode-2", "decode-3"):
            cluster.workers[worker_id].set(load=WorkerLoad(free_blocks=5))

        async def are_full() -> bool:
            workers = cluster.router.cluster.ready("decode")
            return [each.load.free_blocks for each in workers].count(5) == 3

        await eventually(are_full)

        async def fill(_: Context) -> None:
            [replica] = cluster.calls.replicas
            assert replica.worker_id in ("decode-0", "decode-4")
            cluster.workers[replica.worker_id].set(load=WorkerLoad(free_blocks=0))

            async def is_full() -> bool:
                workers = cluster.router.cluster.ready("decode")
                return [each.load.free_blocks for each in workers].count(0) == 1

            await eventually(is_full)

        ask = after_first_token(cluster, wants_replica(cluster, failed_epoch=0))
        cluster.script.fail("decode_token", None, both(both(ask, fill), vanish))
        text, _ = await cluster.stream()
        assert text == TEXT
        record = await cluster.only_trace()
        [_, after] = [each for each in record["decisions"] if each["tier"] == "decode"]
        assert after["worker"] in ("decode-1", "decode-2", "decode-3")


async def test_where_no_other_worker_is_left_nothing_is_copied(redis_server: PrivateRedis, model_dir: Path) -> None:
    one: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}
    async with open_cluster(redis_server, model_dir, one) as cluster:

        async def ask(stream: Any) -> None:
            await stream.write(decode_pb2.DecodeResponse(replica_wanted=decode_pb2.ReplicaWanted()))

        cluster.script.fail("decode_token", None, after_first_token(cluster, ask))
        text, _ = await cluster.stream()
        assert text == TEXT
        assert not cluster.calls.replicas
