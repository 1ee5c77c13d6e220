"""Everything behind batches."""

from __future__ import annotations

from dataclasses import dataclass

from router_svc.api.batches.batch_runs import BatchRuns
from router_svc.api.batches.stored_batches import StoredBatches
from router_svc.api.files.stored_files import StoredFiles
from router_svc.api.responder import Responder
from router_svc.clients.access import Access
from router_svc.config import RouterConfig


@dataclass(frozen=True, slots=True)
class BatchesBackend:
    """What is stored, and what runs."""

    stored: StoredBatches
    runs: BatchRuns

    @classmethod
    def of(
        cls, files: StoredFiles | None, responder: Responder, access: Access, config: RouterConfig
    ) -> BatchesBackend | None:
        """The backend on a store; None: there is no store."""
        if files is None:
            return None
        stored = StoredBatches(files)
        rows, max_line = config.batch_max_num_seqs, config.max_body
        return cls(stored, BatchRuns(stored, responder, access, rows=rows, max_line_bytes=max_line))
