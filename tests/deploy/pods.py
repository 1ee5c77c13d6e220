"""Containers of the manifests as processes, each with a loopback address, so that all have the manifests' ports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pdserve.base.api_key import bearer
from pdserve.cli.private_redis import wait_until_ready
from tests.deploy.manifests import Object, Workload, config_map, environment, expanded, workloads
from tests.support.redis_processes import path_with_redis_server

_START_S = 240
_POLL_S = 0.2
_UNITS = {"Mi": 2**20, "Gi": 2**30}
#: Pods with a Redis: the address that others know, and the file with its password.
_REDIS = {
    "redis": ("pdserve-redis:6379", "/run/secrets/pdserve/redis-password"),
    "state": ("pdserve-state:6379", "/run/secrets/pdserve-state/state-password"),
}


@dataclass(kw_only=True)
class Pod:
    """A container that runs as a process."""

    name: str
    address: str
    container: Object
    process: subprocess.Popen[bytes]
    log: Path
    #: The first API key of the cluster.
    api_key: str

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
        """Returns once a probe succeeds."""
        deadline = time.monotonic() + _START_S
        while self.probe(kind) != 200:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"{self.name}: {kind}; {self.log.read_text()[-2000:]}"
            time.sleep(_POLL_S)

    @property
    def listens_on(self) -> set[int]:
        """Ports on which the process accepts connections."""
        connections = psutil.Process(self.process.pid).net_connections("inet")
        return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}

    @property
    def memory_share(self) -> float:
        """The process's memory as a share of the container's limit."""
        number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", self.container["resources"]["limits"]["memory"]).groups()  # type: ignore[union-attr]
        return float(psutil.Process(self.process.pid).memory_info().rss / (int(number) * _UNITS[unit]))


class Node:
    """A directory with the volumes of all pods, the secrets that `pdserve secrets` makes, and the pods that run."""

    def __init__(self, directory: Path) -> None:
        self.models = directory / "models"
        self.models.mkdir()
        self.secrets = directory / "secrets"
        words = [str(Path(sys.executable).parent / "pdserve"), "secrets", "--to", str(self.secrets)]
        made = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
        self.api_key = made.stdout.split()[-1]
        self._directory = directory
        self._pods: list[Pod] = []
        #: Directories and addresses of the manifests, and what they are here.
        self._here = {"/models": str(self.models)}

    def command(self, render: str, container: Object, **pod: str) -> list[str]:
        """The container's command line, with this machine's paths."""
        variables = environment(render, container) | pod
        words = [expanded(word, variables) for word in [*container["command"], *container.get("args", ())]]
        own = {"python": sys.executable, "pdserve": str(Path(sys.executable).parent / "pdserve")}
        words[0] = own.get(words[0], words[0])
        # A service listens on all addresses, of which other programs of this machine need some.
        words = [word.replace("=0.0.0.0", f"={pod.get('POD_IP')}") for word in words]
        words = [word.replace("redis-server ", f"redis-server --bind {pod.get('POD_IP')} ") for word in words]
        return [self._translated(word) for word in words]

    def variables(self, container: Object) -> dict[str, str]:
        """The container's variables that are written out or from the Secret."""
        found = {each["name"]: self._translated(each["value"]) for each in container.get("env", ()) if "value" in each}
        for each in container.get("env", ()):
            match each:
                case {"name": name, "valueFrom": {"secretKeyRef": {"name": "pdserve-secrets", "key": key}}}:
                    found[name] = (self.secrets / key).read_text()
        return found

    async def start_redis(self) -> None:
        """Runs Redis and the store of responses, which the pods that start later use."""
        for component, (there, _) in _REDIS.items():
            redis = self.start("base", component)
            self._here[there] = f"{redis.address}:6379"
            await wait_until_ready(
                self.url_of(component),
                has_ended=lambda process=redis.process: process.poll() is not None,  # type: ignore[misc]
            )

    def url_of(self, component: str) -> str:
        """The URL of Redis, or of the store of responses, once it was started."""
        there, password_file = _REDIS[component]
        return self._translated(f"redis://{there}?password_file={password_file}")

    def kill_all(self) -> None:
        """Ends all pods without notice."""
        for pod in self._pods:
            pod.process.kill()
            pod.process.wait(60)

    def start(self, render: str, component: str, number: int = 0, **settings: str) -> Pod:
        """Runs a pod of a tier. `settings` are variables of its service."""
        [workload] = [each for each in workloads(render) if each.component == component]
        [container] = workload.containers
        self._mount_secrets(workload, container)
        self._write_config(render)
        data = self._directory / f"{component}-data"
        data.mkdir(exist_ok=True)
        self._here["--dir /data"] = f"--dir {data}"
        address = f"127.{os.getpid() >> 8 & 127}.{os.getpid() & 255}.{len(self._pods) + 2}"
        name = f"{render}-{component}-{number}"
        log = self._directory / f"{name}.log"
        variables = self.variables(container)
        variables |= {f"PDSERVE_{component.upper()}__{key.upper()}": value for key, value in settings.items()}
        variables["PATH"] = path_with_redis_server(self._directory)
        words = self.command(render, container, POD_NAME=name, POD_IP=address)
        with log.open("wb") as output:
            process = subprocess.Popen(words, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT)
        self._pods.append(
            Pod(name=name, address=address, container=container, process=process, log=log, api_key=self.api_key)
        )
        return self._pods[-1]

    def _translated(self, text: str) -> str:
        for there in sorted(self._here, key=len, reverse=True):
            text = text.replace(there, self._here[there])
        return text

    def _mount_secrets(self, workload: Workload, container: Object) -> None:
        """Directories with the keys of the Secret that the pod's volumes have."""
        volumes = {each["name"]: each["secret"] for each in workload.spec.get("volumes", ()) if "secret" in each}
        for mount in container.get("volumeMounts", ()):
            if mount["name"] in volumes:
                folder = self._directory / f"{workload.component}-{mount['name']}"
                folder.mkdir(exist_ok=True)
                for item in volumes[mount["name"]]["items"]:
                    (folder / item["path"]).write_bytes((self.secrets / item["key"]).read_bytes())
                self._here[mount["mountPath"]] = str(folder)

    def _write_config(self, render: str) -> None:
        folder = self._directory / render
        folder.mkdir(exist_ok=True)
        self._here["/etc/pdserve"] = str(folder)
        volumes = [each for workload in workloads(render) for each in workload.spec.get("volumes", ())]
        for name in {each["configMap"]["name"] for each in volumes if "configMap" in each}:
            for file, text in config_map(render, name).items():
                (folder / file).write_text(self._translated(text), encoding="utf-8")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ends all pods when the block does."""
        with ExitStack() as stack:
            try:
                yield
            finally:
                for pod in self._pods:
                    stack.callback(pod.process.wait, 60)
                    pod.process.terminate()

    def wait_until_ready(self) -> None:
        """Returns once the probes of all pods succeed that were started so far."""
        for pod in (each for each in self._pods if "startupProbe" in each.container):
            pod.wait_for("startup")
            pod.wait_for("readiness")
            assert pod.probe("liveness") == 200


def container_of(render: str, component: str) -> Object:
    """The only container of a workload."""
    [workload] = [each for each in workloads(render) if each.component == component]
    [container] = workload.containers
    return container


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete answer: its text, and the workers that the router chose for it, each with its tier."""

    text: str
    workers: tuple[tuple[str, str], ...]


async def ask(router: Pod, prompt: str, *, max_tokens: int, started: asyncio.Event | None = None) -> Answer:
    """A streamed answer, which fails if it is cut off. Sets `started` with its first token."""
    loop, url, key = asyncio.get_running_loop(), f"http://{router.address}:8000/v1", bearer(router.api_key)
    body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": max_tokens}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0}

    def read() -> Answer:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json", **key}
        text, last, request_id = "", b"", ""
        with urllib.request.urlopen(urllib.request.Request(f"{url}/completions", data, kind), timeout=300) as response:
            # Streams that can be resumed have lines with the ids of their events, too.
            for line in (each.strip() for each in response if each.startswith(b"data: ")):
                last = line.removeprefix(b"data: ")
                if last != b"[DONE]":
                    event = json.loads(last)
                    assert "error" not in event, event
                    request_id = event["id"]
                    text += "".join(choice["text"] for choice in event["choices"])
                    if started is not None:
                        loop.call_soon_threadsafe(started.set)
        assert last == b"[DONE]", "the stream was cut off"
        trace = f"http://{router.address}:9000/v1/requests/{request_id}/trace"
        with urllib.request.urlopen(urllib.request.Request(trace, headers=key), timeout=20) as response:
            record: dict[str, Any] = json.loads(response.read())
        return Answer(text=text, workers=tuple((each["tier"], each["worker"]) for each in record["decisions"]))

    try:
        return await asyncio.to_thread(read)
    finally:
        if started is not None:
            started.set()  # Also without a first token, for which others wait.
