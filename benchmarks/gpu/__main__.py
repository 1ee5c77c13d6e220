"""Compares the GPU kernels with the limits of this GPU in one run.

    python -m benchmarks.gpu [--only decode-64,prefill] [--kernels reference] [--dry-run]

The model has the shape of Llama 3.1 8B and random weights in bfloat16. Rows and their bounds are in rows.py, sizes in
setting.py. Without a GPU, --dry-run runs the same code on tiny shapes in Triton's interpreter. Its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import gc
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
from benchmarks.result_files import write_results

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Setting

RESULTS = Path("benchmarks/results")
_KERNELS = ("triton", "reference")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns exit code 1 when a row failed."""
    arguments = _arguments(argv)
    if arguments.dry_run:
        # Triton reads it when a kernel is defined, so it is set before any of them is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from benchmarks.gpu.measure import describe_device, measure_ceilings
    from benchmarks.gpu.setting import FULL, TINY, Setting

    if not (arguments.dry_run or torch.cuda.is_available()):
        print("This machine has no GPU. Use --dry-run to check that everything runs.", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    sizes = TINY if arguments.dry_run else FULL
    environment = describe() | describe_device(device) | {"kernels": arguments.kernels}
    setting = Setting(arguments.kernels, sizes, device)
    measure_now = partial(
        measure_ceilings, setting.clock, device, copy_bytes=sizes.copy_bytes, matmul_size=sizes.matmul_size
    )
    rows = [row for row in ROWS if not arguments.only or row.key in arguments.only]
    # Not inference mode, which does not extend to transformers' own thread.
    with torch.no_grad():
        ceilings = measure_now()
        findings = {row.key: _find(row, setting) for row in rows}
        # Repeated, because a GPU that is warm or shared is slower at times.
        ceilings = ceilings.best(measure_now())
    is_complete = not (arguments.only or arguments.dry_run)
    _report(arguments.out or (RESULTS if is_complete else None), environment, rows, findings, ceilings, setting)
    return int(any(isinstance(finding, NotMeasured) and finding.is_failure for finding in findings.values()))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.key for row in ROWS]
    parser.add_argument("--only", type=_some(names), help=f"rows to measure, of {', '.join(names)}; default: all")
    parser.add_argument("--kernels", choices=_KERNELS, default="triton", help="kernels to measure")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, to check that everything runs")
    parser.add_argument("--out", type=Path, help="directory of the results; default: benchmarks/results if complete")
    return parser.parse_args(argv)


def _some(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
        return names

    return parse


def _measures(setting: Setting) -> Mapping[str, Callable[[], Finding]]:
    """The function that measures each row."""
    from benchmarks.gpu import at_once_rows, block_rows, model_rows, step_rows, transformers_peer

    sizes = setting.sizes
    return {
        "decode-attention-4k": partial(model_rows.decode_attention, setting, sizes.short_context),
        "decode-attention-32k": partial(model_rows.decode_attention, setting, sizes.long_context),
        "prefill-attention": partial(model_rows.prefill_attention, setting),
        "decode-1": partial(model_rows.decode_step, setting, 1),
        "decode-64": partial(model_rows.decode_step, setting, sizes.batch),
        "prefill": partial(model_rows.prefill_step, setting),
        "transformers": partial(transformers_peer.throughput, setting),
        "requests-16-at-once": partial(at_once_rows.at_once, setting, sizes.at_once[0]),
        "requests-64-at-once": partial(at_once_rows.at_once, setting, sizes.at_once[1]),
        "requests-256-at-once": partial(at_once_rows.at_once, setting, sizes.at_once[2]),
        "deterministic": partial(model_rows.deterministic_step, setting),
        "deterministic-prefill": partial(model_rows.deterministic_prefill, setting),
        "handover": partial(block_rows.handover, setting),
        "handover-exposed": partial(block_rows.exposed, setting),
        "handover-128": partial(block_rows.short_handover, setting),
        "handover-128-exposed": partial(block_rows.short_exposed, setting),
        "handover-64-at-once": partial(block_rows.short_handover, setting, at_once=sizes.batch),
        "decode-during-handovers": partial(block_rows.decode_during_handovers, setting, sizes.batch),
        "handover-nccl": partial(block_rows.handover_nccl, setting),
        "gather": partial(block_rows.moving, setting, "gather"),
        "digest": partial(block_rows.moving, setting, "digest"),
        "pack": partial(block_rows.moving, setting, "pack"),
        "idle-1": partial(step_rows.idle_share, setting, 1),
        "idle-64": partial(step_rows.idle_share, setting, sizes.batch),
        "unpack": partial(block_rows.moving, setting, "unpack"),
    }


def _find(row: Row, setting: Setting) -> Finding:
    """Measures a row and frees its memory."""
    import torch

    print(f"{row.key} ...", flush=True)
    try:
        return _measures(setting)[row.key]()
    except Exception as error:  # noqa: BLE001 - on a GPU rented by the minute, one failed row must not cost the others
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
    """Prints the tables, and writes them with all samples to `out` unless that is None."""
    from benchmarks.gpu.report import raw, rooflines, table

    packages = environment["packages"]
    assert isinstance(packages, dict)
    text = "\n".join(
        [
            f"# GPU kernels, {environment['date']}\n",
            f"{environment['gpu'] or 'No GPU: a dry run whose figures mean nothing'}; {setting.backend} kernels; "
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
    write_results(out, f"gpu-{environment['date']}", result, text)


if __name__ == "__main__":
    sys.exit(main())
