"""A model of the hub into a directory: the hub's client downloads and resumes, and each file's digest is compared."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fetch.hub_name import HubName
from pdserve.model.fetch.manifest import git_blob_id, sha256_of
from pdserve.model.fetch.progress import ProgressCallback

#: Weights, JSON and templates.
HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
#: The client keeps unfinished files and their etags here.
_CLIENT_FILES = ".cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """What the hub says of a file."""

    name: str
    #: SHA-256 of a large file; None for one that is in the git repository itself.
    sha256: str | None
    #: Git's name of a file in the repository: a SHA-1 over its header and content.
    blob_id: str | None


def fill_from_hub(model: HubName, directory: Path, progress: ProgressCallback, *, endpoint: str | None = None) -> str:
    """Fills `directory`, in which an earlier try may have left files. Returns the commit. Raises `SetupError`.

    A file whose digest is wrong is removed, so that the next try downloads it again.
    """
    try:
        from huggingface_hub import HfApi, errors, snapshot_download
        from huggingface_hub.hf_api import RepoFile
    except ImportError as error:
        raise SetupError(
            f"Cannot get {model} from the model hub without the package huggingface_hub. Install it with pip."
        ) from error
    progress(f"Downloading {model} from the model hub", 0, None)
    # A name that the client's module of errors has for whichever HTTP library the client uses.
    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        repo_id = model.repo_id
        commit = model.require(HfApi(endpoint=endpoint).model_info(repo_id, revision=model.revision).sha)
        snapshot_download(
            repo_id, revision=commit, local_dir=directory, endpoint=endpoint, allow_patterns=list(HUB_FILES)
        )
        tree = list(HfApi(endpoint=endpoint).list_repo_tree(repo_id, revision=commit, recursive=True))
    except (OSError, ValueError, http_error) as error:
        raise hub_error(model, error, otherwise="Run it again to resume, or use a local directory") from error
    files = [
        HubFile(name=file.path, sha256=None if file.lfs is None else file.lfs.sha256, blob_id=file.blob_id)
        for file in tree
        if isinstance(file, RepoFile)
    ]
    damaged = sorted(_damaged(directory, files))
    for name in damaged:
        (directory / name).unlink()
    if damaged:
        raise SetupError(
            f"{', '.join(damaged)} of {model} arrived with another digest than the hub's. Run it again: what was "
            "damaged is downloaded anew."
        )
    shutil.rmtree(directory / _CLIENT_FILES, ignore_errors=True)
    return commit


def hub_error(model: HubName, error: Exception, *, otherwise: str) -> SetupError:
    """What the user can do about an error of the hub's client; `otherwise` if it has no cause known here."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model.repo_id}"
    token = "give an access token in HF_TOKEN, or name its file in HF_TOKEN_PATH"
    if isinstance(error, errors.GatedRepoError):
        return SetupError(f"{model} is gated. Accept its terms on {page}, then {token}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return SetupError(
            f"The model hub has no {model}, or does not show it to you. Check {page}; if it is private, {token}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SetupError(
            f"{model.repo_id} has no revision {model.revision} on the model hub. Name a branch, a tag or a commit of "
            f"{page}."
        )
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return SetupError(
            f"{model} is not on this machine, and HF_HUB_OFFLINE keeps it from being downloaded. Run pdserve fetch "
            "where the hub can be reached, and give the directory."
        )
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return SetupError(f"Cannot get {model} from the model hub: {reason}. {otherwise}.")


def _damaged(directory: Path, files: list[HubFile]) -> Iterator[str]:
    for file in files:
        path = directory / file.name
        if not path.is_file():
            continue
        if file.sha256 is not None:
            if sha256_of(path) != file.sha256:
                yield file.name
        elif file.blob_id is not None and git_blob_id(path) != file.blob_id:
            yield file.name
