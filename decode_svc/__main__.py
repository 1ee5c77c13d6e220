"""`python -m decode_svc`: one decode worker."""

from __future__ import annotations

from decode_svc.config import DecodeConfig
from pdserve.base.collector import importing
from pdserve.net.service import run_service


async def _serve(config: DecodeConfig) -> None:
    # Imported here so that --help and errors in flags need not wait for torch.
    with importing():
        from decode_svc.service import DecodeService
        from pdserve.worker.serve.process import serve_worker

    await serve_worker(config, "decode", lambda worker: DecodeService(worker, config))


def main() -> None:
    """Runs the worker until it is stopped by a signal."""
    run_service(
        DecodeConfig,
        "decode_svc",
        _serve,
        description="A decode worker: receives KV blocks and generates tokens with continuous batching.",
    )


if __name__ == "__main__":
    main()
