"""Settings of the router; names and meanings follow `vllm serve` where they are the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.base.config import option, parse_bytes
from pdserve.base.logs import LEVELS

LOCAL_PREFILL = ("auto", "threshold")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What the router needs to know at start."""

    model: str = option(help="directory of the model, as `pdserve up` prepared it", metavar="DIR")
    redis_url: str = option(help="Redis with the worker registry and the prefix index", metavar="URL")
    served_model_name: str | None = option(None, help="name clients use; the directory's name when absent")
    host: str = option("127.0.0.1", help="address to listen on", metavar="ADDRESS")
    port: int = option(8000, help="port of the HTTP API; 0 takes a free one", minimum=0)
    grpc_port: int | None = option(
        None, help="port of the gRPC API; one above --port when absent, 0 takes a free one", minimum=0
    )
    prefill_expected: int = option(
        1,
        help="prefill workers meant to run; with 0, decode workers prefill and this is not counted as a fallback",
        minimum=0,
    )
    local_prefill_threshold: int = option(
        64, help="prompts with at most this many uncached tokens are prefilled by the decode worker", minimum=0
    )
    local_prefill: str = option(
        "auto",
        help="when decode workers prefill what is longer: where that is clearly sooner (auto), or never (threshold)",
        choices=LOCAL_PREFILL,
    )
    max_num_queued_reqs: int = option(512, help="requests that may wait; more get 429 and a Retry-After", minimum=0)
    max_body: int = option(8 * 1024**2, help="largest request body, such as 8MiB", parse=parse_bytes, minimum=1024)
    queue_timeout_s: float = option(120.0, help="seconds a request may wait in the queue", minimum=0.1)
    reserve_timeout_s: float = option(
        600.0, help="seconds a request may wait on a decode worker for blocks, behind others", minimum=0.1
    )
    token_timeout_s: float = option(300.0, help="seconds without a token after which a worker is given up", minimum=0.1)
    drain_timeout_s: float = option(45.0, help="seconds that running requests get to finish on SIGTERM", minimum=0)
    trace_capacity: int = option(1000, help="finished requests whose records are kept in memory", minimum=1)
    log_level: str = option("info", help="what is logged", choices=LEVELS)

    @property
    def model_dir(self) -> Path:
        """The model's directory."""
        return Path(self.model)

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model_dir.name

    @property
    def effective_grpc_port(self) -> int:
        """The gRPC port to bind; 0 takes a free one."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + 1 if self.port else 0
