"""What a saga writes down as it goes: into the request's record, into the metrics, and about lost workers."""

from __future__ import annotations

from pdserve.base.errors import PdserveError, reason_of
from pdserve.base.workers import WorkerRecord
from pdserve.v1 import decode_pb2, prefill_pb2
from router_svc.records.record import Phase, Record
from router_svc.records.request_state import RequestState
from router_svc.request.calls import is_gone
from router_svc.routing.cluster import Cluster
from router_svc.routing.local_prefill import LocalPrefillReason, PrefillPlan
from router_svc.routing.placement import Placement

_S = RequestState


class Journal:
    """The books of one request. Owned by its saga."""

    def __init__(self, record: Record, cluster: Cluster) -> None:
        self.record = record
        self._metrics = cluster.metrics
        self._directory = cluster.directory
        self._last_tokens_s: float | None = None
        self._has_decoded = False
        #: Why the decode worker prefills, if it does.
        self._local_prefill_reason = LocalPrefillReason.SHORT
        #: So many uncached tokens were to be its own at most.
        self._local_prefill_threshold = 0

    def chose(self, placement: Placement) -> None:
        """A prefill worker was chosen."""
        self.record.decide(placement.worker, placement.why)

    def chose_decode(self, placement: Placement, plan: PrefillPlan) -> None:
        """A decode worker was chosen, and which way the prompt is to go."""
        self.record.decide(placement.worker, "; ".join(filter(None, (placement.why, plan.why))))
        self._local_prefill_reason = plan.reason
        self._local_prefill_threshold = plan.threshold

    def granted(self, granted: decode_pb2.TicketGranted, worker: WorkerRecord) -> None:
        """A decode worker holds blocks for the request."""
        self._reserved(worker)
        self.record.reported["reserve_s"] = granted.reserve_s

    def started(self, started: decode_pb2.DecodeStarted, worker: WorkerRecord) -> None:
        """The sequences run on a decode worker."""
        self._reserved(worker)
        self.record.move(_S.DECODING)
        self.record.reported["decode_queue_s"] = started.queue_s
        if started.prefilled_locally:
            uncached = self.record.prompt_tokens - started.cached_tokens
            if self._local_prefill_reason is LocalPrefillReason.SHORT and uncached > self._local_prefill_threshold:
                self.fall_back("not_receivable", worker)
            self.record.prefilled_by = "decode"
            self.record.local_prefill_reason = self._local_prefill_reason
            self.record.cached_tokens = started.cached_tokens
        else:
            self.record.mark(Phase.COMMIT)

    def progressed(self, progress: prefill_pb2.PrefillProgress) -> None:
        """A prefill worker told how far it is."""
        if progress.queued:
            return
        self.record.mark(Phase.PREFILL_START, ago_s=progress.computing_s)
        if progress.computed_tokens:
            self.record.computed(progress.computed_tokens)

    def prefilled(self, first: prefill_pb2.PrefillFirstToken) -> None:
        """A prefill worker has sampled the first tokens."""
        self.record.prefilled_by = "prefill"
        self.record.local_prefill_reason = None
        self.record.cached_tokens = first.cached_tokens

    def committed(self, done: prefill_pb2.PrefillDone) -> None:
        """A prefill worker is done, and tells how long it took."""
        self.record.mark(Phase.COMMIT)
        self.record.reported.update(
            prefill_queue_s=done.queue_s,
            prefill_compute_s=done.compute_s,
            transfer_s=done.transfer_s,
            commit_s=done.commit_s,
            exposed_s=done.exposed_s,
            sent_bytes=done.sent_bytes,
            sent_blocks=done.sent_blocks,
            chunks=done.chunks,
        )

    def decoded(self) -> None:
        """A decode worker has sent tokens."""
        if not self._has_decoded:
            self._has_decoded = True
            self.record.mark(Phase.FIRST_DECODE)

    def produced(self, completion_tokens: int) -> None:
        """The client gets tokens; now there are this many."""
        self.record.completion_tokens = completion_tokens
        now = self.record.elapsed_s()
        if self._last_tokens_s is None:
            self.record.mark(Phase.FIRST_TOKEN)
        else:
            self._metrics.inter_token_latency.observe(now - self._last_tokens_s)
        self._last_tokens_s = now

    def failed_on(self, worker: WorkerRecord, error: PdserveError) -> None:
        """A worker failed the request; one that is gone is told to the directory, so that others avoid it."""
        if is_gone(error):
            self._directory.mark_lost(worker.worker_id, worker.epoch)

    def retry(self, error: PdserveError, worker: WorkerRecord) -> None:
        """The next attempt begins because of `error`."""
        reason = reason_of(error)
        self.record.retries.append(self.record.incident(reason, worker.worker_id, error))
        self._metrics.retried(reason)
        if self.record.state is _S.RETRYING:
            # The last attempt came no further than to be refused.
            self.record.move(_S.QUEUED)
        self.record.move(_S.RETRYING)

    def fall_back(self, reason: str, worker: WorkerRecord) -> None:
        """A decode worker prefills although a prefill worker should have."""
        self.record.fallbacks.append(self.record.incident(reason, worker.worker_id, None))
        self._metrics.fell_back(reason)
        self._local_prefill_reason = LocalPrefillReason.FALLBACK

    def _reserved(self, worker: WorkerRecord) -> None:
        if self.record.state in (_S.QUEUED, _S.RETRYING):
            self.record.move(_S.RESERVED, worker=worker)
        self.record.mark(Phase.RESERVED)
