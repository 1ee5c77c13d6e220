"""`python -m router_svc`: one router."""

from __future__ import annotations

from pdserve.net.service import run_service
from router_svc.config import RouterConfig
from router_svc.process import serve


def main() -> None:
    """Runs the router until SIGTERM or SIGINT."""
    run_service(
        RouterConfig,
        "router_svc",
        serve,
        description="Serves the OpenAI-compatible API and routes requests through the cluster.",
    )


if __name__ == "__main__":
    main()
