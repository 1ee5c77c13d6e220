"""Settings of `pdserve chaos`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.config import option, positional, words_option
from pdserve.base.errors import SetupError
from pdserve.base.option_values import parse_bytes
from pdserve.cli.chaos.faults import DEFAULT_KINDS, KINDS
from pdserve.cli.up_config import DEFAULT_MODEL


def parse_kinds(text: str) -> tuple[str, ...]:
    """Parses kinds of faults such as `kill-decode stop-worker`; returns them in the order of the summary."""
    names = set(text.replace(",", " ").split())
    if unknown := names - set(KINDS):
        raise ValueError(f"{', '.join(sorted(unknown))} is not one of {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """Settings of `pdserve chaos`."""

    model: str = positional(DEFAULT_MODEL, help="name, directory, .gguf file or hub id of the model", metavar="MODEL")
    requests: int = option(200, help="number of requests to send under faults", minimum=1)
    seed: int = option(0, help="the same seed gives the same requests and the same plan of faults", metavar="N")
    distinct: int = option(
        48, help="number of different requests; each is answered once without faults, for comparison", minimum=1
    )
    concurrency: int = option(10, help="requests that run at the same time", metavar="N", minimum=1)
    max_output_len: int = option(128, help="maximum tokens to generate; the minimum is 16", minimum=16)
    prefill: int = option(2, help="number of prefill workers", metavar="N", minimum=1)
    decode: int = option(2, help="number of decode workers", metavar="N", minimum=1)
    routers: int = option(2, help="number of routers", metavar="N", minimum=1)
    fault_interval_s: float = option(1.0, help="mean seconds between two faults", minimum=0.01)
    faults: tuple[str, ...] = words_option(DEFAULT_KINDS, help="kinds of faults", parse=parse_kinds, metavar="KIND")
    kv_cache_memory: int = option(
        128 << 20, help="size of each worker's KV cache, small so that long prompts fill it", parse=parse_bytes
    )
    timeout_s: float = option(180.0, help="seconds after which a request counts as lost", minimum=1)
    settle_timeout_s: float = option(
        90.0, help="seconds for all workers to be ready and all blocks to be free after the run", minimum=1
    )
    log_dir: str | None = option(None, help="directory of the log files; default: as for pdserve up")
    result: str | None = option(None, help="file for the summary as JSON", metavar="FILE")

    def __post_init__(self) -> None:
        if self.routers < 2 and any(kind.endswith("-router") for kind in self.faults):
            raise SetupError("Faults of routers need --routers 2 or more: clients go on at another one.")
