"""What a stranger finds at the ports of a running cluster, and answers that show whether it changed something."""

from __future__ import annotations

import asyncio

import psutil

from tests.support.cluster import MODEL, Cluster, WorkerStatus
from tests.support.lazily import openai

PROMPT = "The capital of France is Paris. The capital of Spain is Madrid. " * 12 + "The capital of Germany is"


def _listening(process: psutil.Process) -> set[int]:
    return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def stream_address(cluster: Cluster, worker: WorkerStatus) -> str:
    """A stranger finds it by trying: it answers a start, and the ports of UCX do not."""
    known = {int(address.rpartition(":")[2]) for address in (worker.grpc_address, worker.http_address)}
    text = (cluster.log_dir / f"{worker.worker_id}.log").read_text()
    port = int(text.rpartition(" streams=127.0.0.1:")[2].split()[0])
    assert port in _listening(cluster.processes()[worker.worker_id]) - known
    return f"127.0.0.1:{port}"


def ucx_ports(cluster: Cluster) -> dict[str, set[int]]:
    """Ports by worker: those it listens on that are none of ours."""
    found = {}
    for worker in (*cluster.workers("prefill"), *cluster.workers("decode")):
        # A prefill worker listens for requests of the decode tier, too: it may get that role.
        ours = {worker.grpc_address, worker.http_address, stream_address(cluster, worker)}
        ports = _listening(cluster.processes()[worker.worker_id])
        found[worker.worker_id] = ports - {int(address.rpartition(":")[2]) for address in ours}
    return found


async def _stream(cluster: Cluster, number: int, salt: str, started: asyncio.Semaphore) -> str | openai.APIError:
    """The text of an answer whose blocks are handed over, or the error that it ended with."""
    text = ""
    try:
        async with cluster.async_client() as client:
            async for chunk in await client.completions.create(
                model=MODEL,
                prompt=f"{number}. {PROMPT}",
                max_tokens=24,
                temperature=0,
                stream=True,
                # Another salt, so that no block of an earlier answer is found in a cache.
                extra_body={"ignore_eos": True, "cache_salt": salt},
            ):
                text += chunk.choices[0].text
                started.release()
    except openai.APIError as error:
        return error
    return text


async def streams(cluster: Cluster, salt: str, started: asyncio.Semaphore) -> list[str | openai.APIError]:
    return await asyncio.gather(*(_stream(cluster, number, salt, started) for number in range(3)))
