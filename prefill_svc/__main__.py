"""`python -m prefill_svc`: one prefill worker."""

from __future__ import annotations

from pdserve.base.collector import importing
from pdserve.net.service import run_service
from prefill_svc.config import PrefillConfig


async def _serve(config: PrefillConfig) -> None:
    # Imported here so that --help and errors in flags need not wait for torch.
    with importing():
        from pdserve.worker.serve.process import serve_worker
        from prefill_svc.service import PrefillService

    await serve_worker(config, "prefill", lambda worker: PrefillService(worker, config))


def main() -> None:
    """Runs the worker until it is stopped by a signal."""
    run_service(
        PrefillConfig,
        "prefill_svc",
        _serve,
        description="A prefill worker: computes prompts and streams their KV blocks to decode workers.",
    )


if __name__ == "__main__":
    main()
