"""Redis as operators have it: users, TLS, Sentinels, a cluster, and several clusters of ours in one Redis."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from redis.crc import key_slot

from kvtransfer.index.kv_log import KvEventBatch, KvLog, StreamPosition
from pdserve.base.block_hash import BlockHash
from pdserve.base.errors import SetupError, StoreError
from pdserve.base.ids import Epoch, RequestId, WorkerId
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.registry import Registrar, read_sightings
from pdserve.redis.redis_servers import parse_servers
from pdserve.redis.store import Store, as_bytes, as_list, is_reachable
from pdserve.worker.serve.last_exit import ExitNote, Reason
from router_svc.records.redis_memory import RedisMemory
from router_svc.records.request_state import RequestProgress
from router_svc.records.request_store import RequestStore
from router_svc.records.usage import Account, Usage
from router_svc.records.usage_store import UsageStore
from router_svc.request.client import Client
from router_svc.request.limiter import Limiter
from router_svc.request.limits import Limits
from tests.support.deadline import DEADLINE_S
from tests.support.records import worker_record
from tests.support.redis import eventually, running
from tests.support.redis_processes import NUM_SLOTS, redis_cluster, redis_process, replicated, tls_proxy

A = WorkerId("a")
HASH = BlockHash(b"0123456789abcdef")
REQUEST = RequestId("r")
#: docs/operations/redis.md has the same.
RIGHTS = ("~pd:*", "+@read", "+@write", "+@scripting", "+@connection", "+time", "-@dangerous", "+info")


async def use(store: Store) -> None:
    """Everything that services keep in Redis: a worker, its blocks, how its process ended, a request, limits, usage."""
    async with running(Registrar(store, worker_record).run()):
        await eventually(lambda: _has_worker(store))
    log = KvLog(store)
    assert await log.write(A, Epoch(1), 1, [KvEventBatch(reset=True, added=(HASH,))])
    assert (await log.incarnations()).epochs == {A: 1}
    assert [page async for page in log.hashes(A, Epoch(1))] == [(HASH,)]
    assert len(await log.read(StreamPosition(), block_s=0.01)) == 1
    await log.remove(A, Epoch(1))
    note = ExitNote(store, A)
    await note.ended(Reason.STOPPED)
    assert await note.exchange() is not None
    requests = RequestStore(store)
    await requests.write(RequestProgress.new(REQUEST, at=1.0))
    assert await requests.get(REQUEST) is not None
    assert len(await requests.newest(1)) == 1
    limiter = Limiter(store)
    limiter.settle(await limiter.reserve(Client(id="k", limits=Limits(parallel=1)), 1), 1)
    await limiter._settle_batch()
    assert (limiter.decided_alone, len(limiter._unsettled)) == (0, 0)
    usage = UsageStore(store)
    usage.add(Account(tenant="t", key_id="k", model="m"), Usage(requests=1))
    await usage.flush()
    assert len(await usage.read(usage.today(), usage.today(), "t")) == 1
    await usage.trim()
    memory = RedisMemory(store)
    await memory.measure()
    assert memory.used_bytes


async def denials(admin: Store) -> list[object]:
    """What the server has refused users for lack of rights, as `ACL LOG` has it."""
    return [*as_list(await admin.call("ACL", "LOG"))]


@pytest.mark.own_redis
async def test_a_user_needs_the_documented_rights_only(tmp_path: Path) -> None:
    async with redis_process(tmp_path) as server, Store(server.url) as admin:
        # Without CLIENT, which some servers count as dangerous: redis-py sends it on each connection by default.
        await admin.call("ACL", "SETUSER", "pdserve", "on", ">se:cret", *RIGHTS, "-client")
        url = server.url.replace("://", "://pdserve:se%3Acret@")
        async with Store(url) as store:
            await use(store)
            assert await denials(admin) == []
            await admin.call("ACL", "SETUSER", "default", "off")
            with pytest.raises(StoreError, match="permissions"):
                await store.call("GET", "other:key")
        assert not await is_reachable(server.url)
        async with Store(server.url.replace("://", "://pdserve:wrong@")) as store:
            with pytest.raises(StoreError, match=r"cannot be used: .*password"):
                await store.call("PING")
            assert "wrong" not in store.address


@pytest.mark.parametrize("right", ["~pd:*", "+@read", "+@write", "+@scripting", "+time", "+info"])
async def test_each_documented_right_is_needed(tmp_path: Path, right: str) -> None:
    async with redis_process(tmp_path) as server, Store(server.url) as admin:
        rights = [each for each in RIGHTS if each != right]
        await admin.call("ACL", "SETUSER", "pdserve", "on", ">secret", *rights)
        async with Store(server.url.replace("://", "://pdserve:secret@")) as store, asyncio.timeout(DEADLINE_S):
            with suppress(StoreError, AssertionError, TimeoutError):
                await use(store)
        assert await denials(admin) != []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
async def test_the_documented_rights_are_enough_over_tls(tmp_path: Path) -> None:
    async with redis_process(tmp_path) as server, tls_proxy(tmp_path, server) as url, Store(server.url) as admin:
        await admin.call("ACL", "SETUSER", "pdserve", "on", ">secret", *RIGHTS, "-client")
        async with Store(url.replace("://", "://pdserve:secret@"), timeout_s=5) as store:
            await use(store)
        assert await denials(admin) == []


@pytest.mark.own_redis
async def test_a_password_in_a_file_is_read_for_each_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    async with redis_process(tmp_path) as server:
        async with Store(server.url) as admin:
            await admin.call("CONFIG", "SET", "requirepass", "first")
        async with Store(f"{server.url}?password_file={file}") as store:
            await use(store)
        file.write_text("second")
        async with Store(f"{server.url}?password_file={file}") as store:
            with pytest.raises(StoreError, match=r"cannot be used: .*password"):
                await store.call("PING")
            file.write_text("first")
            assert await store.call("PING")
    # redis-py warns of what it finds deprecated, for each connection.
    assert [record for record in caplog.records if record.name.startswith("redis")] == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://host?password_file=/absent/file", "/absent/file cannot be read: No such file"),
        ("redis://:secret@host?password_file=/absent/file", "both a password and a password_file"),
    ],
)
def test_a_password_file_that_cannot_be_used_is_named(url: str, reason: str) -> None:
    with pytest.raises(SetupError, match=reason) as refusal:
        parse_servers(url, "pd")
    assert "secret" not in str(refusal.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
async def test_tls_with_a_certificate_to_trust(tmp_path: Path) -> None:
    async with redis_process(tmp_path) as server, tls_proxy(tmp_path, server) as url:
        async with Store(url, timeout_s=5) as store:
            await use(store)
        async with Store(url.split("?")[0], timeout_s=5) as distrustful:
            with pytest.raises(StoreError, match="certificate verify failed"):
                await distrustful.call("PING")


async def test_sentinels_lead_to_the_master_and_after_its_loss_to_its_successor(tmp_path: Path) -> None:
    async with replicated(tmp_path) as servers, Store(servers.url) as store:
        # The first Sentinel in the URL does not exist, so the first call fails and the next one asks the other.
        assert not store.available
        await use(store)
        await servers.master.kill()
        with pytest.raises(StoreError):
            await store.call("PING")
        before = store.outages
        await eventually(lambda: _can_write(store))
        assert store.outages >= before
        async with Store(servers.replica.url) as successor:
            assert await successor.call("GET", store.key("written")) == b"yes"


async def test_a_master_that_became_a_replica_is_left(tmp_path: Path) -> None:
    async with redis_process(tmp_path) as server, Store(server.url) as store:
        assert await _can_write(store)
        await store.call("REPLICAOF", "127.0.0.1", 1)
        for write in (lambda: store.call("SET", store.key("written"), "no"), lambda: KvLog(store).remove(A, Epoch(1))):
            outages = store.outages
            with pytest.raises(StoreError, match=r"cannot be used: .*(read only|READONLY)"):
                await write()
            assert store.outages == outages + 1


async def test_all_keys_are_on_one_node_of_a_cluster_and_are_followed_to_another(tmp_path: Path) -> None:
    async with redis_cluster(tmp_path) as nodes:
        # The hash slots of these prefixes are on the first and on the second node.
        prefixes = [next(name for name in map(str, range(99)) if _node_of(name) == node) for node in (0, 1)]
        for prefix in prefixes:
            url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            async with Store(url, prefix=prefix) as store:
                assert store.key("x") == f"{{{prefix}}}:x"
                await use(store)
        async with Store(url, prefix=prefixes[1]) as store, Store(nodes[0].url) as first, Store(nodes[1].url) as second:
            await store.call("PING")
            name = await first.call("CLUSTER", "MYID")
            await second.call("FLUSHALL")
            for node in (first, second):
                await node.call("CLUSTER", "SETSLOT", key_slot(f"{{{prefixes[1]}}}".encode()), "NODE", as_bytes(name))
            with pytest.raises(StoreError, match="cannot be used"):
                await store.call("GET", store.key("x"))
            await eventually(lambda: _can_write(store))
            assert await first.call("GET", store.key("written")) == b"yes"


async def test_a_user_of_a_redis_cluster_may_ask_for_its_slots_too(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(redis_cluster(tmp_path))
        admins = [await stack.enter_async_context(Store(node.url)) for node in nodes]
        for admin in admins:
            await admin.call(
                "ACL", "SETUSER", "pdserve", "on", ">secret", "~{pd}:*", *RIGHTS[1:], "+cluster|slots", "-client"
            )
        url = "redis+cluster://pdserve:secret@" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        await use(await stack.enter_async_context(Store(url)))
        assert [await denials(admin) for admin in admins] == [[]] * len(admins)


async def test_a_user_of_sentinels_may_ask_for_the_master_alone(tmp_path: Path) -> None:
    async with (
        replicated(tmp_path) as servers,
        Store(servers.master.url) as master,
        Store(servers.sentinel.url) as other,
    ):
        await master.call("ACL", "SETUSER", "pdserve", "on", ">secret", *RIGHTS)
        may = ("+@connection", "+sentinel|get-master-addr-by-name", "-client")
        await other.call("ACL", "SETUSER", "watch", "on", ">word", *may)
        address = f"pdserve:secret@127.0.0.1:{servers.sentinel.port}"
        url = f"redis+sentinel://{address}/primary?sentinel_username=watch&sentinel_password=word"
        async with Store(url) as store:
            await use(store)
        assert await denials(master) == await denials(other) == []


async def test_clusters_with_different_prefixes_share_a_redis(redis_server: PrivateRedis) -> None:
    async with (
        Store(redis_server.url, prefix="blue") as blue,
        Store(redis_server.url, prefix="green") as green,
        running(Registrar(blue, worker_record).run()),
    ):
        await eventually(lambda: _has_worker(blue))
        assert await read_sightings(green) == []
        await use(green)
        assert len(await read_sightings(blue)) == 1


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1", "schemes"),
        ("redis+sentinel://127.0.0.1:26379", "does not name the service"),
        ("redis+cluster://127.0.0.1:7000/1", "no databases"),
        ("redis+cluster://127.0.0.1:seven", "invalid literal|Port could not be cast"),
        ("rediss://127.0.0.1?ssl_cacerts=/etc/ca.pem", "ssl_cacerts"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_the_forms_that_can(url: str, reason: str) -> None:
    with pytest.raises(SetupError, match=f"({reason}).*Write redis://"):
        Store(url)


@pytest.mark.parametrize("prefix", ["", "a b", "*", "{a", "x" * 65])
def test_a_prefix_of_other_characters_is_refused(prefix: str) -> None:
    with pytest.raises(SetupError, match="--redis-prefix"):
        Store("redis://127.0.0.1", prefix=prefix)


def _node_of(prefix: str) -> int:
    return key_slot(f"{{{prefix}}}".encode()) // (NUM_SLOTS // 2)


async def _has_worker(store: Store) -> bool:
    return len(await read_sightings(store)) == 1


async def _can_write(store: Store) -> bool:
    try:
        return await store.call("SET", store.key("written"), "yes") == b"OK"
    except StoreError:
        return False
