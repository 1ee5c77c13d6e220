"""The compose stack, run for real: an answer, blocks by CMA between containers, a crash, tiers that come and go."""

from __future__ import annotations

import json
import re
import time

import pytest

from pdserve.base.api_key import KEY_VARIABLE
from pdserve.base.errors import PdserveError
from pdserve.cli.router_client import get
from tests.arch.documents import code_blocks, read
from tests.deploy.engine import run
from tests.deploy.load import Answer, running, tokens_for
from tests.deploy.notes import note
from tests.deploy.stack import Stack

pytestmark = pytest.mark.deploy

CLIENTS = 3
#: Answers under which tiers are scaled last longer than ten seconds, and less than the drain. Two decode workers read
#: weights in turns on the same cores: with them answers last more than twice as long as they were measured before.
ANSWER_S = 13.0
LONG_S, DRAIN_S = 10.0, 45.0


def test_a_newcomer_gets_an_answer(stack: Stack) -> None:
    """By the commands of the README, after its start with Docker."""
    [curl] = [block for block in code_blocks("README.md", "sh") if block.startswith("curl")]
    curl = curl.replace("127.0.0.1:8000", f"127.0.0.1:{stack.port}")
    answer = json.loads(run("sh", "-c", curl.replace("curl", "curl -sS", 1), environment={KEY_VARIABLE: stack.api_key}))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert "prefill" in stack.execute("router", "pdserve", "status")
    assert "TTFT" in stack.execute("router", "pdserve", "trace", answer["id"])
    assert stack.execute("router", "pdserve", "chat", "Name three primary colors.").strip()


def test_workers_are_drained_and_moved_from_the_container_of_the_router(stack: Stack) -> None:
    """Fails without the secret or a certificate, and for role with workers of a single tier."""
    [worker] = stack.workers("prefill")
    assert "is drained" in stack.execute("router", "pdserve", "drain", worker.worker_id, "--force")
    assert "serves again" in stack.execute("router", "pdserve", "drain", worker.worker_id, "--undo")
    assert "takes requests of the decode tier" in stack.execute("router", "pdserve", "role", worker.worker_id, "decode")
    stack.until(lambda: len(stack.workers("decode")) == 2, "the router has seen the new role")
    assert "equally many" in stack.execute("router", "pdserve", "rebalance")
    stack.execute("router", "pdserve", "role", worker.worker_id, "prefill")
    stack.wait_tiers()


def test_containers_are_healthy_by_their_own_check(stack: Stack) -> None:
    services = ("router", "prefill", "decode", "redis", "state")

    def states() -> set[str]:
        return {stack.containers(service)[0]["State"]["Health"]["Status"] for service in services}

    stack.until(lambda: states() == {"healthy"}, "every container is healthy")


def test_blocks_travel_between_containers_from_memory_to_memory(stack: Stack) -> None:
    load = stack.load(max_tokens=4)
    answers = [load.stream(number) for number in range(4)]
    assert load.failures() == []
    assert len(answers) == 4
    paths = stack.samples("prefill", "pdserve_transport_path_info")
    assert [(labels["expected"], labels["actual"]) for labels, _ in paths] == [("local", "local")]
    assert sum(value for _, value in stack.samples("prefill", "pdserve_transport_degraded")) == 0
    received = stack.samples("decode", "pdserve_kv_transfer_bytes_total")
    num_bytes = sum(value for labels, value in received if labels["direction"] == "received")
    assert num_bytes > 1e6
    note(f"KV received through shared memory between containers: {num_bytes / 1e6:.1f} MB")


def test_doctor_transfers_from_container_to_container(stack: Stack) -> None:
    line = None
    deadline = time.monotonic() + 60
    while line is None and time.monotonic() < deadline:
        found = stack.execute("router", "sh", "-c", "pdserve doctor || true")
        line = re.search(r"^ok +\S+ to \S+: local, [\d.]+ GB/s.*", found, re.MULTILINE)
        if "the workers serve requests" not in found:
            break
    assert line, found
    note(f"doctor between containers: {line[0]}")


STRANGER = r"""
import fcntl, http.client, json, os, socket, ssl, struct, sys, time
import grpc

found = {}


def ask(host, port, path, headers={}):
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("GET", path, headers=headers)
    return connection.getresponse().status


for port, path in ((8000, "/v1/models"), (8002, "/metrics"), (8002, "/v1/cluster"), (8002, "/console/events")):
    found[path] = ask("router", port, path)
for host in ("redis", "state"):
    with socket.create_connection((host, 6379), timeout=10) as redis:
        redis.sendall(b"HGETALL pd:workers\r\n")
        found[host] = redis.recv(100).decode().split()[0]


def listens_without_tls(host, port):
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def takes_strangers(host, port):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=10) as plain, context.wrap_socket(plain) as stream:
            stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            return bool(stream.recv(1))
    except (OSError, ssl.SSLError):
        return False


# What every UCX reads as the beginning of a connection, and a message that writes to an address.
CONNECT = "78563412bebafeca201d000000010000000000000000000000000200e1977f0000010000000000000000"
PUT = struct.pack("<BIQQI", 33, 20, 16, 64, 1) + b"x" * 64


def taken_by_ucx(host):
    # Ports of UCX, and the bytes of a stranger that the worker's kernel took there.
    open_ones, ports = [], 0
    for port in range(19600, 19620):
        try:
            connection = socket.create_connection((host, port), timeout=10)
        except ConnectionRefusedError:
            continue
        connection.sendall(bytes.fromhex(CONNECT) + PUT)
        open_ones.append(connection)
        ports += 1
    time.sleep(2)
    sent = len(bytes.fromhex(CONNECT) + PUT)
    return [ports, sum(sent - struct.unpack("i", fcntl.ioctl(each, 0x5411, b"0000"))[0] for each in open_ones)]


# Without its guard, this would end workers.
for host in ("prefill", "decode") if os.environ.get("GUARDED") else ():
    found[f"{host}: ports of UCX, bytes taken"] = taken_by_ucx(host)
for host, ports in (("prefill", (50051, 50052)), ("decode", (50051, 50052))):
    for port in ports:
        found[f"{host}:{port}"] = takes_strangers(host, port)
    found[f"{host} without TLS"] = listens_without_tls(host, 50051)
print(json.dumps(found))
"""


def test_a_stranger_in_the_network_is_refused_everywhere(stack: Stack) -> None:
    epochs = {worker.epoch for tier in ("prefill", "decode") for worker in stack.workers(tier)}
    [network] = stack.containers("router")[0]["NetworkSettings"]["Networks"]
    image = stack.variables["PDSERVE_ROUTER_IMAGE"]
    guards = {value for tier in ("prefill", "decode") for _, value in stack.samples(tier, "pdserve_transport_guarded")}
    [is_guarded] = map(bool, guards)
    note(f"ports of UCX: {'guarded' if is_guarded else 'the kernel allows containers no guard'}")
    environment = ("-e", "GUARDED=1") if is_guarded else ()
    entry = ("--entrypoint", "python", "--network", network, *environment)
    found = json.loads(run("docker", "run", "--rm", *entry, image, "-c", STRANGER))
    assert found == {
        **dict.fromkeys(("/v1/models", "/metrics", "/v1/cluster", "/console/events"), 401),
        **dict.fromkeys(("redis", "state"), "-NOAUTH"),
        **dict.fromkeys(("prefill:50051", "prefill:50052", "decode:50051", "decode:50052"), False),
        **dict.fromkeys(("prefill without TLS", "decode without TLS"), "UNAVAILABLE"),
        **{f"{tier}: ports of UCX, bytes taken": [1, 0] for tier in ("prefill", "decode") if is_guarded},
    }
    # No worker ended.
    stack.wait_tiers()
    assert {worker.epoch for tier in ("prefill", "decode") for worker in stack.workers(tier)} == epochs


def test_prometheus_key_reads_metrics_and_nothing_else(stack: Stack) -> None:
    printed = stack.compose(
        "run", "--rm", "-T", "--no-deps", "--entrypoint", "cat", "secrets", "/secrets/metrics/metrics-key"
    )
    key = printed.split()[-1]  # Compose prints its progress, too.
    assert "pdserve_" in get(f"http://127.0.0.1:{stack.admin_port}", "/metrics", key).decode()
    with pytest.raises(PdserveError, match="nothing else"):
        get(stack.base_url, "/v1/models", key)


def test_a_second_start_keeps_the_secrets(stack: Stack) -> None:
    key = stack.api_key
    stack.compose("up", "-d", "--no-build")
    assert stack.api_key == key
    stack.wait_tiers()


def test_what_is_stored_outlives_its_process_and_an_answer_needs_no_store(stack: Stack) -> None:
    """Fails without a volume, without its log on it, or if anything but stored responses waits for the store."""
    command = "REDISCLI_AUTH=$(cat /secrets/state/state-password) redis-cli "

    def ask(words: str) -> str:
        return stack.execute("state", "sh", "-c", command + words).strip()

    assert ask("set pdstate:kept 1") == "OK"
    stack.crash("state")
    stack.until(lambda: ask("get pdstate:kept") == "1", "the store is back with what it had")
    stack.compose("stop", "state")
    load = stack.load(max_tokens=4)
    load.stream(0)
    assert load.failures() == []
    stack.compose("restart", "router")
    stack.wait_tiers()
    load.stream(1)
    assert load.failures() == []
    stack.compose("rm", "-f", "state")
    stack.compose("up", "-d", "--no-build", "--no-recreate", "state")
    stack.until(lambda: ask("get pdstate:kept") == "1", "the volume has it for a new container, too")


def test_usage_outlives_redis_with_its_container(stack: Stack) -> None:
    """Fails without a volume, or without its log on it: budgets would start again."""
    command = "REDISCLI_AUTH=$(cat /secrets/redis/redis-password) redis-cli "

    def usage() -> str:
        return stack.execute("redis", "sh", "-c", f"{command} --raw hgetall pd:usage:2026-01-01").strip()

    assert stack.execute("redis", "sh", "-c", f"{command} hset pd:usage:2026-01-01 row 1").strip() == "1"
    stack.crash("redis")
    stack.until(lambda: usage() == "row\n1", "Redis is back with what it had")
    stack.compose("rm", "-sf", "redis")
    stack.compose("up", "-d", "--no-build", "--no-recreate", "redis")
    stack.until(lambda: usage() == "row\n1", "the volume has it for a new container, too")
    stack.wait_tiers()


def test_workers_compute_on_cores_that_no_other_one_has(stack: Stack) -> None:
    def claimed(tier: str) -> set[str]:
        found = re.findall(r"cores_claimed.*?cpus=([\d,]+)", stack.logs(tier))
        return set(found[-1].split(","))

    assert claimed("prefill").isdisjoint(claimed("decode"))


def test_workers_have_no_rights(stack: Stack) -> None:
    for tier in ("prefill", "decode"):
        status = stack.execute(tier, "cat", "/proc/self/status")
        assert re.search(r"^Uid:\t1000\t1000\t1000\t1000$", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)


LOAD_LIBRARY = """
import ctypes, os, pathlib, shutil
import kernels.cpu.native as native

directory = pathlib.Path.home() / "library"
directory.mkdir()
ctypes.CDLL(shutil.copy(native.load().__file__, directory))
shutil.rmtree(directory)
print("loaded")
"""


def test_a_worker_loads_a_library_from_its_cache(stack: Stack) -> None:
    """Fails on a tmpfs: Triton compiles into this directory, and loads from there."""
    for tier in ("prefill", "decode"):
        assert stack.execute(tier, "python", "-P", "-c", LOAD_LIBRARY).strip() == "loaded"


def _settle(stack: Stack) -> None:
    stack.until(lambda: stack.view().router.running == 0, "no request runs")


def test_a_prefill_worker_that_is_killed_costs_no_answer(stack: Stack) -> None:
    load = stack.load(max_tokens=32)
    [before] = stack.workers("prefill")
    with running(load, clients=CLIENTS):
        load.wait_running(1)
        stack.crash("prefill")

        def is_back() -> bool:
            return any(worker.epoch != before.epoch for worker in stack.workers("prefill"))

        stack.until(is_back, "the engine has restarted the worker")
        load.stop()
    assert load.failures() == []
    _settle(stack)


def test_a_stream_outlives_the_only_decode_worker(stack: Stack) -> None:
    load = stack.load(max_tokens=1000)
    [before] = stack.workers("decode")
    with running(load, clients=1):
        load.wait_running(1)
        load.stop()
        stack.crash("decode")
    assert load.failures() == [], stack.logs("router")[-6000:]
    [after] = stack.workers("decode")
    assert after.epoch != before.epoch
    _settle(stack)


def _serves_over_shared_memory(stack: Stack) -> None:
    load = stack.load(max_tokens=4)
    load.stream(0)
    assert load.failures() == []
    paths = stack.samples("prefill", "pdserve_transport_path_info")
    assert [labels["actual"] for labels, _ in paths] == ["local"]
    _settle(stack)


def _epochs(stack: Stack) -> dict[str, int]:
    return {worker.worker_id: worker.epoch for tier in ("prefill", "decode") for worker in stack.workers(tier)}


def _start_what_is_down(stack: Stack, lost: dict[str, int]) -> None:
    """By the command of the unit that the host runs; returns when lost workers are back, with other epochs."""
    page = "docs/operations/containers.md"
    [arguments] = re.findall(r"^ExecStart=.* -f compose/compose\.yaml (.+)$", read(page), re.MULTILINE)
    assert f"docker compose -f compose/compose.yaml {arguments}\n" in code_blocks(page, "sh")
    stack.compose(*arguments.split())

    def are_back() -> bool:
        found = _epochs(stack)
        return found.keys() == lost.keys() and all(epoch != lost[worker_id] for worker_id, epoch in found.items())

    stack.until(are_back, "all workers are back")


def test_after_a_killed_pause_container_the_workers_come_back_to_its_namespaces(stack: Stack) -> None:
    """The engine restarts it and the workers at the same time. A worker that comes first stays down."""
    services = ("pause", "prefill", "decode")
    lost = _epochs(stack)
    pids = {service: stack.containers(service)[0]["State"]["Pid"] for service in services}
    stack.crash("pause")

    def is_tried(service: str) -> bool:
        state = stack.containers(service, stopped=True)[0]["State"]
        is_up = state["Status"] == "running" and state["Pid"] != pids[service]
        # Its namespaces are gone, or end while it joins them: the engine's errors differ.
        return is_up or (state["Status"] == "exited" and bool(state["Error"]))

    stack.until(lambda: all(map(is_tried, services)), "the engine has tried to restart each container")
    up = {service: found[0]["State"]["Pid"] for service in services if (found := stack.containers(service))}
    note(f"up by itself after the death of pause: {', '.join(up)}")
    assert "pause" in up
    _start_what_is_down(stack, lost)
    assert {service: stack.containers(service)[0]["State"]["Pid"] for service in up} == up
    _serves_over_shared_memory(stack)


def test_the_unit_of_the_host_starts_what_an_engine_has_left_down(stack: Stack) -> None:
    """As after a reboot at which workers came before the owner of their namespaces."""
    router = stack.containers("router")[0]["Id"]
    lost = _epochs(stack)
    stack.compose("kill", "prefill", "decode", "pause")
    _start_what_is_down(stack, lost)
    assert stack.containers("router")[0]["Id"] == router
    _serves_over_shared_memory(stack)


@pytest.mark.nightly
@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_a_tier_is_scaled_up_and_down_under_load_without_an_error(stack: Stack, tier: str) -> None:
    load = stack.load(max_tokens=tokens_for(ANSWER_S, stack.load(max_tokens=96), clients=CLIENTS))
    under_way: list[Answer] = []
    with running(load, clients=CLIENTS):
        load.wait_running(CLIENTS)
        stack.scale(tier, 2)
        stack.wait_tiers()
        load.wait_next(1)
        under_way += load.wait_running(CLIENTS)
        if tier == "decode":
            stack.until(lambda: all(worker.running for worker in stack.workers(tier)), "both workers write answers")
        # Returns when the worker has drained: it got SIGTERM while these answers were being written.
        stack.scale(tier, 1)
        stack.wait_tiers()
    assert load.failures() == []
    durations = [answer.duration_s for answer in under_way]
    took = ", ".join(f"{seconds:.1f} s" for seconds in durations)
    note(f"{tier}: answers of {load.max_tokens} tokens, written while a worker was drained, took {took}")
    assert LONG_S < max(durations) < DRAIN_S
    [container] = stack.containers(tier)
    assert container["State"]["Running"]
    _settle(stack)


def test_on_sigterm_everything_ends_by_itself(stack: Stack) -> None:
    """The last test: an exit code of 137 would be a container that the engine had to kill."""
    stack.compose("stop")
    codes = {
        service: stack.containers(service, stopped=True)[0]["State"]["ExitCode"]
        for service in ("router", "prefill", "decode", "redis", "state")
    }
    assert codes == dict.fromkeys(codes, 0)
    stack.down()
    assert not any(stack.containers(service, stopped=True) for service in (*codes, "pause", "model", "secrets"))
