"""A capacity plan as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.cli.byte_sizes import decimal_size
from pdserve.cli.model_sizes import ModelSizes
from pdserve.cli.plan.capacity import Fit, Load, Speeds, Workers

MEASURED, ASSUMED, COMPUTED = "measured", "assumed", "from the config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is shown."""

    model: str
    sizes: ModelSizes
    fit: Fit
    load: Load
    speeds: Speeds
    workers: Workers
    #: Where the speeds come from.
    speed_basis: str
    #: What was assumed, one sentence each.
    assumptions: Sequence[str]


def as_json(plan: Plan) -> str:
    """The plan as one JSON object, in bytes, seconds and tokens."""
    return json.dumps(asdict(plan), indent=2)


def show_plan(plan: Plan) -> None:
    """Prints the plan."""
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, value, basis in _rows(plan):
        table.add_row(name, value, basis)
    console.print(table)
    console.print()
    for line in plan.assumptions:
        console.print(Text(f"- {line}"))


def _rows(plan: Plan) -> list[tuple[str, str, str]]:
    sizes, fitting, speeds, needed = plan.sizes, plan.fit, plan.speeds, plan.workers
    ranks = "" if sizes.num_ranks == 1 else f" on {sizes.num_ranks} ranks"
    tpot = "unknown" if speeds.tpot_s is None else f"{1000 * speeds.tpot_s:.1f} ms"
    return [
        ("parameters", f"{sizes.num_parameters / 1e6:,.1f} million", COMPUTED),
        ("weights", f"{decimal_size(sizes.weight_bytes)}{ranks}", f"{COMPUTED}, {sizes.dtype}"),
        ("KV per token", decimal_size(sizes.kv_bytes_per_token), f"{COMPUTED}, {sizes.kv_dtype}"),
        ("KV cache of a worker", decimal_size(fitting.kv_bytes), "usable memory - weights - activations"),
        ("tokens in it", f"{fitting.kv_tokens:,}", f"{fitting.num_blocks:,} blocks of {sizes.block_size}"),
        ("sequences of full length", f"{fitting.full_sequences:,}", "--isl + --osl"),
        ("sequences on average", f"{fitting.average_sequences:,}", "--isl + half of --osl"),
        ("prompt tokens per second", f"{speeds.prefill_tokens_per_s:,.0f}", f"one prefill worker, {plan.speed_basis}"),
        ("output tokens per second", f"{speeds.decode_tokens_per_s:,.0f}", f"one decode worker, {plan.speed_basis}"),
        ("sequences decoding at once", f"{speeds.decoding:,}", f"TPOT {tpot}, {plan.speed_basis}"),
        ("handover", f"{decimal_size(needed.handover_bytes_per_s)}/s", "KV of all prompts between the tiers"),
        ("prefill workers", str(needed.prefill), f"{needed.prefill_load:.2f} busy all the time"),
        ("decode workers", str(needed.decode), f"{needed.decode_load:.2f} busy all the time"),
    ]
