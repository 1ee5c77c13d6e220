"""Names of models of a hub: `org/name`, or `org/name@REVISION` with a branch, a tag or a commit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdserve.base.errors import SetupError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([A-Za-z0-9][\w./-]{0,254}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository of a hub, at a revision."""

    repo_id: str
    #: None: the newest one.
    revision: str | None

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which always has the same files."""
        return self.revision is not None and is_commit(self.revision)

    def require(self, commit: str | None) -> str:
        """The commit that the hub has found for the revision. Raises `SetupError` for another one than the pinned."""
        if commit is None or not is_commit(commit) or (self.is_pinned and commit != self.revision):
            raise SetupError(
                f"The model hub answers for {self} with commit {commit!r:.60}. Check HF_ENDPOINT, or name a revision."
            )
        return commit

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def hub_name(model: str) -> HubName | None:
    """The repository that a model's name may mean; None for one of another form."""
    match = _NAME.fullmatch(model)
    return None if match is None or model.endswith(".gguf") else HubName(repo_id=match[1], revision=match[2])


def is_commit(text: str) -> bool:
    """Whether it has the form of a commit."""
    return bool(_COMMIT.fullmatch(text))
