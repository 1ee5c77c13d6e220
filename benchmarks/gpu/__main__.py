"""The GPU kernels against what this GPU can do, in one run.

    python -m benchmarks.gpu [--only decode-64,prefill] [--kernels reference] [--dry-run]

The shape is that of Llama 3.1 8B, with random weights in bfloat16. Rows and what they must reach: rows.py; sizes:
setting.py. Without a GPU there is --dry-run: the same code on tiny shapes in Triton's interpreter, for no figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.environment import describe
from benchmarks.gpu.rows import ROWS, Ceilings, Finding, NotMeasured, Row

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Setting

RESULTS = Path("benchmarks/results")
_KERNELS = ("triton", "reference")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit code is 1 when a row broke."""
    arguments = _arguments(argv)
    if arguments.dry_run:
        # Read when a kernel is defined: before any of them is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from benchmarks.gpu.measure import describe_device, measure_ceilings
    from benchmarks.gpu.setting import FULL, TINY, Setting

    if not (arguments.dry_run or torch.cuda.is_available()):
        print("There is no GPU here; --dry-run shows that everything runs.", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    sizes = TINY if arguments.dry_run else FULL
    environment = describe() | describe_device(device) | {"kernels": arguments.kernels}
    setting = Setting(arguments.kernels, sizes, device)
    ceilings_of_now = partial(
        measure_ceilings, setting.clock, device, copy_bytes=sizes.copy_bytes, matmul_size=sizes.matmul_size
    )
    rows = [row for row in ROWS if not arguments.only or row.key in arguments.only]
    # Not inference mode: transformers goes on in a thread of its own, which is not in it.
    with torch.no_grad():
        ceilings = ceilings_of_now()
        findings = {row.key: _find(row, setting) for row in rows}
        # Again: a GPU that is warm, or that others use too, is slower at times.
        ceilings = ceilings.best(ceilings_of_now())
    is_complete = not (arguments.only or arguments.dry_run)
    _report(arguments.out or (RESULTS if is_complete else None), environment, rows, findings, ceilings, setting)
    return int(any(isinstance(finding, NotMeasured) and finding.is_failure for finding in findings.values()))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.key for row in ROWS]
    parser.add_argument("--only", type=_some(names), help=f"rows to measure, of {', '.join(names)}; all when absent")
    parser.add_argument("--kernels", choices=_KERNELS, default="triton", help="what is measured")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU: to see that everything runs")
    parser.add_argument("--out", type=Path, help="directory of the results; when absent, complete runs have theirs")
    return parser.parse_args(argv)


def _some(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: none of {', '.join(known)}")
        return names

    return parse


def _measures(setting: Setting) -> Mapping[str, Callable[[], Finding]]:
    """How each row is measured."""
    from benchmarks.gpu import block_rows, model_rows, step_rows, transformers_peer

    sizes = setting.sizes
    return {
        "decode-attention-4k": partial(model_rows.decode_attention, setting, sizes.short_context),
        "decode-attention-32k": partial(model_rows.decode_attention, setting, sizes.long_context),
        "prefill-attention": partial(model_rows.prefill_attention, setting),
        "decode-1": partial(model_rows.decode_step, setting, 1),
        "decode-64": partial(model_rows.decode_step, setting, sizes.batch),
        "prefill": partial(model_rows.prefill_step, setting),
        "transformers": partial(transformers_peer.throughput, setting),
        "deterministic": partial(model_rows.deterministic_step, setting),
        "handover": partial(block_rows.handover, setting),
        "handover-exposed": partial(block_rows.exposed, setting),
        "handover-nccl": partial(block_rows.handover_nccl, setting),
        "pack": partial(block_rows.packing, setting, unpacks=False),
        "idle-1": partial(step_rows.idle_share, setting, 1),
        "idle-64": partial(step_rows.idle_share, setting, sizes.batch),
        "unpack": partial(block_rows.packing, setting, unpacks=True),
    }


def _find(row: Row, setting: Setting) -> Finding:
    """Measures a row and lets its memory go."""
    import torch

    print(f"{row.key} ...", flush=True)
    try:
        return _measures(setting)[row.key]()
    except Exception as error:  # noqa: BLE001 - on a GPU lent by the minute one broken row must not cost the others
        traceback.print_exc()
        return NotMeasured(why=f"{type(error).__name__}: {str(error)[:300]}", is_failure=True)
    finally:
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def _report(
    out: Path | None,
    environment: Mapping[str, object],
    rows: Sequence[Row],
    findings: Mapping[str, Finding],
    ceilings: Ceilings,
    setting: Setting,
) -> None:
    """Prints the tables, and writes them with all samples to `out` if there is one."""
    from benchmarks.gpu.report import raw, rooflines, table

    packages = environment["packages"]
    assert isinstance(packages, dict)
    text = "\n".join(
        [
            f"# GPU kernels, {environment['date']}\n",
            f"{environment['gpu'] or 'No GPU: a dry run, its figures mean nothing'}; {setting.backend} kernels; "
            f"torch {packages['torch']}, triton {packages['triton']}; commit {environment['commit']}. Llama 3.1 8B "
            "with random weights, bfloat16, KV blocks of 16 tokens scattered over the cache. Medians of "
            f"{setting.clock.repeats} calls between CUDA events, with a cold L2 cache.\n",
            table(rows, findings, ceilings),
            "\n## Rooflines\n",
            rooflines(rows, findings, ceilings),
            "",
        ]
    )
    print(text)
    if out is None:
        return
    result = {
        "environment": environment,
        "workload": asdict(setting.sizes),
        "ceilings": asdict(ceilings),
        "rows": raw(rows, findings, ceilings),
    }
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"gpu-{environment['date']}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"Written: {stem}.json and {stem}.md")


if __name__ == "__main__":
    sys.exit(main())
