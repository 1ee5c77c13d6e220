"""Start of a worker that changes its role. The tier in which it starts names its settings and its log lines."""

from __future__ import annotations

from decode_svc.config import DecodeConfig
from pdserve.base.collector import importing
from pdserve.net.service import run_service
from pdserve.peers.workers import Tier


def run(tier: Tier) -> None:
    """Runs the worker until it is stopped by a signal."""

    async def serve(config: DecodeConfig) -> None:
        # Imported here so that --help and errors in flags need not wait for torch.
        with importing():
            from pdserve.worker.serve.process import serve_worker
            from worker_svc.service import RolesService

        await serve_worker(config, tier, lambda worker: RolesService(worker, config))

    run_service(
        DecodeConfig,
        f"{tier}_svc",
        serve,
        description=f"A worker of the {tier} tier that `pdserve role` moves to the other tier while it runs.",
    )
