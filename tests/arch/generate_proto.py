"""Generate `pdserve/v1` from `proto/`, or check (`--check`) that the committed files are up to date."""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
BIN = Path(sys.executable).parent


def generate(out: Path) -> None:
    """Write messages, services and type stubs for every proto file to a directory below `out`."""
    files = [str(path.relative_to(PROTO)) for path in sorted(PROTO.rglob("*.proto"))]
    arguments = [
        "protoc",
        f"--proto_path={PROTO}",
        f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
        f"--plugin=protoc-gen-mypy={BIN / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={BIN / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *files,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed. Its message is above.")


def stale_files(fresh: Path) -> list[str]:
    """Names of generated files that differ from the committed ones, are missing, or no longer have a source."""
    committed = ROOT / "pdserve" / "v1"
    names = {path.name for path in fresh.iterdir()} | {path.name for path in committed.glob("*_pb2*")}
    _, mismatch, errors = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
    return mismatch + errors


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing and fail if a file is out of date")
    check = parser.parse_args().check
    if not check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        stale = stale_files(Path(directory) / "pdserve" / "v1")
    if stale:
        sys.exit(f"Out of date with proto/: {', '.join(stale)}. Run: make proto")


if __name__ == "__main__":
    main()
