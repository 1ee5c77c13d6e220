"""The commands of the base, run as processes: they fetch a model, serve, answer probes and the smoke test, and drain.

Every pod gets a loopback address of its own, so that all of them listen on the ports of the manifests.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pdserve.cli.private_redis import PrivateRedis
from tests.deploy.manifests import Object, config_map, environment, expanded, workloads

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(sys.platform != "linux", reason="needs a network 127.0.0.0/8 on the loopback device"),
]
START_S = 240
#: Pods of each tier.
PODS = {"prefill": 1, "decode": 2, "router": 1}


@dataclass(kw_only=True)
class Pod:
    """A container of the base that runs as a process."""

    name: str
    address: str
    container: Object
    process: subprocess.Popen[bytes]
    log: Path

    def probe(self, kind: str) -> int:
        """The status of a probe; 0 without an answer."""
        get = self.container[f"{kind}Probe"]["httpGet"]
        [port] = [each["containerPort"] for each in self.container["ports"] if each["name"] == get["port"]]
        try:
            with urllib.request.urlopen(f"http://{self.address}:{port}{get['path']}", timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_for(self, kind: str) -> None:
        """Returns once a probe succeeds, in the time that the manifest gives it."""
        probe = self.container[f"{kind}Probe"]
        deadline = time.monotonic() + min(START_S, probe["periodSeconds"] * probe["failureThreshold"])
        while self.probe(kind) != 200:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"{self.name}: {kind}; {self.log.read_text()[-2000:]}"
            time.sleep(0.2)


class Node:
    """A directory with the volumes of all pods, and the pods that run."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.directory = directory
        self.pods: list[Pod] = []
        self._redis_url = redis_url
        for name in ("router", "workers"):
            for file, text in self._data(f"pdserve-{name}-").items():
                (directory / file).write_text(text, encoding="utf-8")

    @staticmethod
    def _data(prefix: str) -> dict[str, str]:
        containers = [each for workload in workloads("base") for each in workload.spec.get("volumes", ())]
        [name] = {
            each["configMap"]["name"]
            for each in containers
            if each.get("configMap", {}).get("name", "").startswith(prefix)
        }
        return config_map("base", name)

    def command(self, container: Object, **pod: str) -> list[str]:
        """The container's command line, with this machine's paths."""
        variables = environment("base", container) | pod
        words = [expanded(word, variables) for word in [*container["command"], *container.get("args", ())]]
        words[:1] = [sys.executable] if words[0] == "python" else [str(Path(sys.executable).parent / words[0])]
        paths = {"/etc/pdserve": str(self.directory), "/models": str(self.directory / "models")}
        for there, here in paths.items():
            words = [word.replace(there, here) for word in words]
        # A router listens on all addresses, of which other programs of this machine need some.
        return [word.replace("=0.0.0.0", f"={pod.get('POD_IP')}") for word in words]

    def start(self, container: Object, tier: str, number: int) -> Pod:
        """Runs a container of a tier."""
        address = f"127.{os.getpid() >> 8 & 127}.{os.getpid() & 255}.{len(self.pods) + 2}"
        name = f"pdserve-{tier}-{number}"
        log = self.directory / f"{name}.log"
        variables = {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
        variables |= {f"PDSERVE_{tier.upper()}__REDIS_URL": self._redis_url}
        words = self.command(container, POD_NAME=name, POD_IP=address)
        # Config files are in a volume, and name a Redis that is elsewhere here: the environment wins over them.
        with log.open("wb") as output:
            process = subprocess.Popen(words, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT)
        pod = Pod(name=name, address=address, container=container, process=process, log=log)
        self.pods.append(pod)
        return pod


def container_of(component: str) -> Object:
    [workload] = [each for each in workloads("base") if each.component == component]
    [container] = workload.containers
    return container


@contextmanager
def running(node: Node) -> Iterator[dict[str, list[Pod]]]:
    with ExitStack() as stack:
        pods: dict[str, list[Pod]] = {}
        for tier, count in PODS.items():
            pods[tier] = []
            for number in range(count):
                pod = node.start(container_of(tier), tier, number)
                stack.callback(pod.process.wait, 30)
                stack.callback(pod.process.terminate)
                pods[tier].append(pod)
        for pod in node.pods:
            pod.wait_for("startup")
            pod.wait_for("readiness")
            assert pod.probe("liveness") == 200
        yield pods


async def stream(router: Pod, *, max_tokens: int, started: asyncio.Event) -> str:
    """The text of a long streamed answer; sets `started` with its first token."""
    body = {"model": "smollm2-135m-instruct", "prompt": "Once upon a time" * 20, "max_tokens": max_tokens}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0}
    loop = asyncio.get_running_loop()

    def read() -> str:
        request = urllib.request.Request(
            f"http://{router.address}:8000/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        text, done = "", False
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    loop.call_soon_threadsafe(started.set)
        assert done
        return text

    return await asyncio.to_thread(read)


async def test_the_commands_of_the_base_serve_and_lose_no_answer_when_pods_end(tmp_path: Path) -> None:
    async with PrivateRedis() as redis:
        node = Node(tmp_path, redis.url)
        fetch = node.command(container_of("fetch-model"))
        await asyncio.to_thread(subprocess.run, fetch, check=True, stdout=subprocess.DEVNULL, timeout=300)
        await _serve(node)


async def _serve(node: Node) -> None:
    with running(node) as pods:
        [router], [prefill], decode = pods["router"], pods["prefill"], pods["decode"]
        smoke_test = [
            word.replace("pdserve-router", router.address) for word in node.command(container_of("smoke-test"))
        ]
        answer = await asyncio.to_thread(subprocess.run, smoke_test, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr
        assert "Paris" in answer.stdout
        for pod in (prefill, *decode):
            own = {port["containerPort"] for port in pod.container["ports"]}
            found = {
                each.laddr.port
                for each in psutil.Process(pod.process.pid).net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            }
            assert own <= found
            assert found - own <= set(range(19600, 19620)), f"{pod.name} listens on {found}"
        expected = await stream(router, max_tokens=200, started=asyncio.Event())
        # Each tier loses a worker while answers run.
        for pod in (decode[1], prefill):
            started = [asyncio.Event() for _ in range(4)]
            answers = [asyncio.create_task(stream(router, max_tokens=200, started=event)) for event in started]
            for event in started:
                await event.wait()
            pod.process.send_signal(signal.SIGTERM)
            assert [await each for each in answers] == [expected] * len(answers)
            assert await asyncio.to_thread(pod.process.wait, 60) == 0
        assert await stream(router, max_tokens=200, started=asyncio.Event()) == expected
