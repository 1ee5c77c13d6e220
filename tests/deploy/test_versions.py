"""This version's router serves with the last release's workers, and the last release's router with these workers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve import __version__
from pdserve.cli.free_ports import free_port
from pdserve.cli.private_redis import find_redis_server, server_argv, wait_until_ready
from pdserve.model.resolve import DEFAULT_MODEL, resolve_model

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
#: Commits of the releases, for a clone without tags.
RELEASES = {"v0.1.0": "1e411789"}
READY_S = 120.0
_POLL_S = 0.1
#: More than the threshold of local prefill, so that it is handed over.
PROMPT = "The capital of France is Paris. The capital of Spain is Madrid. " * 8 + "The capital of Germany is"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the last release."""
    name, commit = list(RELEASES.items())[-1]
    directory = tmp_path_factory.mktemp(name)
    for revision in (name, commit):
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(directory, filter="data")
            return directory
    pytest.skip(f"this clone has neither the tag {name} nor its commit")


@contextmanager
def service(tree: Path, module: str, log: Path, **settings: object) -> Iterator[None]:
    """A service of the version in `tree`, with settings in its environment."""
    prefix = f"PDSERVE_{module.removesuffix('_svc').upper()}__"
    variables = {prefix + name.upper(): str(value) for name, value in settings.items()}
    environment = {**os.environ, **variables, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as output:
        command = [sys.executable, "-m", module]
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


@contextmanager
def cluster(router: Path, workers: Path, directory: Path) -> Iterator[str]:
    """A router of one version and a worker of each tier of another. Yields the router's URL."""
    model, unix_socket = resolve_model(DEFAULT_MODEL).path, directory / "redis.sock"
    port, decode_http = free_port(), free_port()
    shared: dict[str, object] = {"model": model, "redis_url": f"unix://{unix_socket}", "served_model_name": "m"}
    # The release has no C++ kernels built, so both compute with plain torch.
    of_workers = {**shared, "kernels": "reference", "threads": 1, "kv_cache_memory": "64MiB", "dtype": "float32"}
    with ExitStack() as stack:
        redis = subprocess.Popen(server_argv(find_redis_server(), directory=directory, unix_socket=unix_socket))
        stack.callback(redis.wait)
        stack.callback(redis.terminate)
        asyncio.run(wait_until_ready(f"unix://{unix_socket}"))
        for module, http_port in (("decode_svc", decode_http), ("prefill_svc", 0)):
            name = module.removesuffix("_svc")
            settings: Mapping[str, object] = {**of_workers, "worker_id": name, "http_port": http_port}
            stack.enter_context(service(workers, module, directory / f"{name}.log", **settings))
        settings = {**shared, "port": port, "grpc_port": 0}
        stack.enter_context(service(router, "router_svc", directory / "router.log", **settings))
        url = f"http://127.0.0.1:{port}"
        _wait_for_both_tiers(url)
        yield url
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{decode_http}/metrics").read().decode()
        samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
        handed_over = [each for each in samples if each.name == "pdserve_kv_transfers_total"]
        assert [each.value for each in handed_over if each.labels["outcome"] == "committed"] == [2.0]
        [version] = {sample.labels["version"] for sample in samples if sample.name == "pdserve_worker_info"}
        assert (version == __version__) == (workers == ROOT)


def ask(url: str, **fields: object) -> dict[str, Any]:
    """The answer to a greedy completion of the prompt."""
    body = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    if not fields.get("stream"):
        return dict(json.loads(text)["choices"][0])
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return {"text": "".join(choice["text"] for event in events for choice in event["choices"])}


@pytest.mark.parametrize("newer", ["router", "workers"])
def test_the_last_release_and_this_version_serve_together(release: Path, tmp_path: Path, newer: str) -> None:
    router, workers = (ROOT, release) if newer == "router" else (release, ROOT)
    with cluster(router, workers, tmp_path) as url:
        whole = ask(url, logprobs=1)
        assert " Berlin" in whole["text"]
        assert len(whole["logprobs"]["tokens"]) == 12
        assert ask(url, stream=True, prompt=f"Again. {PROMPT}")["text"]
        answers = urllib.request.urlopen(f"{url}/v1/cluster").read()
        assert {worker["tier"] for worker in json.loads(answers)["workers"]} == {"prefill", "decode"}


def _wait_for_both_tiers(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            workers = json.loads(urllib.request.urlopen(f"{url}/v1/cluster").read())["workers"]
            if {worker["tier"] for worker in workers if worker["ready"]} == {"prefill", "decode"}:
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(_POLL_S)
    raise AssertionError(f"not both tiers are ready after {READY_S} s")
