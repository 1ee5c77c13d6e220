"""The commands of the manifests, run as processes: they serve, answer probes and the smoke test, drain and roll out."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from pdserve.base.api_key import bearer
from pdserve.cli.router_client import get_model
from pdserve.cli.status import ClusterStatus
from tests.deploy.manifests import Object
from tests.deploy.pods import Answer, Node, Pod, ask, container_of
from tests.support.redis import eventually

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(sys.platform != "linux", reason="needs a network 127.0.0.0/8 on the loopback device"),
]
STORY = ", there was a little girl who lived in a house by the sea." * 5
MAX_TOKENS = 150
UCX_PORTS = set(range(19600, 19620))


@asynccontextmanager
async def node_with_the_model(directory: Path) -> AsyncIterator[Node]:
    """A node with the base's Redis, whose volume has the model, fetched by the Job's command."""
    node = Node(directory)
    fetch = node.command("base", container_of("base", "fetch-model"))
    await asyncio.to_thread(subprocess.run, fetch, check=True, stdout=subprocess.DEVNULL, timeout=300)
    with node.running():
        await node.start_redis()
        yield node


async def all_ready(node: Node, router: Pod, *workers: Pod) -> None:
    """Returns once the probes of all pods succeed and the router, which hears of workers later, has these."""
    await asyncio.to_thread(node.wait_until_ready)
    admin, names = f"http://{router.address}:9000", {pod.name for pod in workers}

    async def are_known() -> bool:
        cluster = await asyncio.to_thread(get_model, admin, "/v1/cluster", ClusterStatus, node.api_key)
        return names <= {worker.worker_id for worker in cluster.workers if worker.ready}

    await eventually(are_known)


async def run_in(node: Node, container: Object, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command with the variables of a container, as the kubelet and `kubectl exec` do."""
    environment = os.environ | node.variables(container)
    return await asyncio.to_thread(subprocess.run, words, env=environment, capture_output=True, text=True, timeout=120)


def status_of(url: str, key: str | None = None) -> int:
    """The HTTP status of `GET url` with this key."""
    headers = {} if key is None else bearer(key)
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


class Crowd:
    """Answers to prompts that no worker has cached, at the same time."""

    def __init__(self, router: Pod) -> None:
        self._router = router
        self._running: dict[str, asyncio.Task[Answer]] = {}

    async def grow(self, size: int) -> list[asyncio.Task[Answer]]:
        """Asks for more answers, and returns when each has its first token."""
        started = [asyncio.Event() for _ in range(size)]
        prompts = [f"{len(self._running) + number} years ago{STORY}" for number in range(size)]
        for prompt, event in zip(prompts, started, strict=True):
            answer = ask(self._router, prompt, max_tokens=MAX_TOKENS, started=event)
            self._running[prompt] = asyncio.create_task(answer)
        for event in started:
            await event.wait()
        return [self._running[prompt] for prompt in prompts]

    async def answers(self) -> list[Answer]:
        """All answers. Fails if one of them is not what the cluster answers now, to this request alone."""
        found = []
        for prompt, task in self._running.items():
            found.append(await task)
            assert found[-1].text == (await ask(self._router, prompt, max_tokens=MAX_TOKENS)).text
        return found


def release_of(worker: str) -> str:
    """The render whose pod a worker is."""
    return worker.rsplit("-", 2)[0]


def pairs_of(answer: Answer) -> list[tuple[str, str]]:
    """The releases of each prefill worker and of the decode worker that it prefilled for.

    A request that a draining worker refuses moves on, to either release, as long as its client has no token.
    """
    found, decode = [], ""
    for tier, worker in answer.workers:
        if tier == "decode":
            decode = release_of(worker)
        else:
            found.append((release_of(worker), decode))
    return found


async def terminated(*pods: Pod) -> None:
    """Returns when pods that got SIGTERM have ended as they should."""
    for pod in pods:
        assert await asyncio.to_thread(pod.process.wait, 75) == 0, pod.log.read_text()[-2000:]


async def test_the_base_serves_and_loses_no_answer_when_pods_of_both_tiers_end(tmp_path: Path) -> None:
    async with node_with_the_model(tmp_path) as node:
        router, prefill = node.start("base", "router"), node.start("base", "prefill")
        decode = [node.start("base", "decode", number) for number in range(2)]
        await all_ready(node, router, prefill, *decode)
        smoke_test = container_of("base", "smoke-test")
        words = [word.replace("pdserve-router", router.address) for word in node.command("base", smoke_test)]
        answer = await run_in(node, smoke_test, words)
        assert answer.returncode == 0, answer.stderr
        assert "Paris" in answer.stdout
        crowd = Crowd(router)
        for pod in (prefill, *decode):
            own = {port["containerPort"] for port in pod.container["ports"]}
            assert own <= pod.listens_on <= own | UCX_PORTS
            assert pod.memory_share < 0.8, pod.name
        for pod in (decode[1], prefill):
            answers = await crowd.grow(4)
            pod.process.send_signal(signal.SIGTERM)
            used = {worker for each in [await task for task in answers] for _, worker in each.workers}
            assert pod.name in used
            await terminated(pod)
        last = await (await crowd.grow(1))[0]
        assert last.workers == (("decode", decode[0].name),)
        assert len(await crowd.answers()) == 9


async def test_what_the_base_starts_wants_a_key_and_answers_operators_and_prometheus(tmp_path: Path) -> None:
    async with node_with_the_model(tmp_path) as node:
        router, prefill, decode = (node.start("base", tier) for tier in ("router", "prefill", "decode"))
        await all_ready(node, router, prefill, decode)
        api, admin = (f"http://{router.address}:{port}" for port in (8000, 9000))
        metrics = (node.secrets / "metrics-key").read_text()
        expected = {
            (f"{api}/v1/models", None): 401,
            (f"{api}/v1/models", node.api_key): 200,
            (f"{api}/metrics", node.api_key): 404,
            (f"{admin}/metrics", None): 401,
            (f"{admin}/metrics", metrics): 200,
            (f"{admin}/v1/cluster", metrics): 403,
            (f"{admin}/v1/cluster", node.api_key): 200,
            (f"http://{decode.address}:9100/metrics", None): 200,
        }
        assert {key: await asyncio.to_thread(status_of, *key) for key in expected} == expected
        pdserve = str(Path(sys.executable).parent / "pdserve")
        for command in ("status", "doctor"):
            words = [pdserve, command, "--base-url", admin]
            refused = await run_in(node, router.container, words)
            assert "API key" in refused.stderr + refused.stdout
            answer = await run_in(node, router.container, [*words, "--api-key", node.api_key])
            assert prefill.name in answer.stdout
            assert decode.name in answer.stdout
            assert answer.returncode < 2, answer.stdout
        # Facts and a test transfer, which workers give to processes with the cluster secret and a certificate alone.
        assert f"{prefill.name} to {decode.name}: " in answer.stdout
        commands = ("drain --force {}", "drain --undo {}", "role --force {} prefill", "role {} decode", "rebalance")
        for words in (each.format(decode.name).split() for each in commands):
            command = [pdserve, *words, "--base-url", admin, "--api-key", node.api_key]
            answer = await run_in(node, router.container, command)
            assert answer.returncode == 0, answer.stderr
        # A port of a worker speaks to none without a certificate of the cluster.
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        certificate = ssl.PEM_cert_to_DER_cert((node.secrets / "peer.pem").read_text())
        for port in (50051, 50052):
            with (
                socket.create_connection((decode.address, port), timeout=20) as plain,
                stranger.wrap_socket(plain) as tls,
            ):
                assert tls.getpeercert(binary_form=True) == certificate
                # The refusal of a client without a certificate comes after its handshake.
                with suppress(ssl.SSLError, ConnectionError):
                    tls.sendall(b"x")
                    assert tls.recv(1) == b""


@pytest.mark.nightly
async def test_a_release_with_another_kv_layout_takes_over_without_losing_an_answer(tmp_path: Path) -> None:
    async with node_with_the_model(tmp_path) as node:
        (node.models / "smollm2-135m-instruct-next").symlink_to(node.models / "smollm2-135m-instruct")
        router = node.start("base", "router")
        old = [node.start("base", tier) for tier in ("prefill", "decode")]
        await all_ready(node, router, *old)
        crowd = Crowd(router)
        new = [node.start("next-release", tier, block_size="32") for tier in ("prefill", "decode")]
        await crowd.grow(4)
        await all_ready(node, router, *old, *new)
        await crowd.grow(8)
        for pod in old:
            pod.process.send_signal(signal.SIGTERM)
        await crowd.grow(4)
        await terminated(*old)
        await crowd.grow(1)
        answers = await crowd.answers()
        pairs = [pair for each in answers for pair in pairs_of(each)]
        assert {(prefill == decode) for prefill, decode in pairs} == {True}, pairs
        assert {decode for _, decode in pairs} == {"base", "next-release"}
        assert {release_of(worker) for _, worker in answers[-1].workers} == {"next-release"}
        assert all(pod.process.poll() is None for pod in new)
