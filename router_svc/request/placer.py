"""Which worker of each tier takes a request next, of those that have not failed it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pdserve.base.errors import Draining, PdserveError
from pdserve.base.ids import WorkerId
from pdserve.base.layout import KvLayout
from pdserve.peers.workers import Tier, WorkerRecord
from router_svc.generation import Generation
from router_svc.request.calls import is_gone
from router_svc.request.output import Output
from router_svc.request.quarantine import Deaths
from router_svc.request.recovery import MAX_PREFILL_FAILURES, Recovery
from router_svc.routing.cluster import Cluster, PrefixHashes
from router_svc.routing.incarnation import Incarnation, incarnation_of
from router_svc.routing.placement import Demand, Placement, choose_decode, choose_prefill, has_spare_blocks


class Placer:
    """The choice of workers for one prompt. Owned by its saga."""

    def __init__(
        self,
        generation: Generation,
        hashes: PrefixHashes,
        cluster: Cluster,
        output: Output,
        *,
        fills_context: bool = False,
    ) -> None:
        """`hashes`: of the prompt's blocks. `fills_context`: the request may take the whole context of the workers."""
        self._generation = generation
        self._hashes = hashes
        self._cluster = cluster
        self._output = output
        self._fills_context = fills_context
        #: Leading blocks of the prompt that each worker has cached.
        self.overlap: dict[WorkerId, int] = {}
        #: Decode worker that gets copies of the request's blocks.
        self.replica: Incarnation | None = None
        #: Workers that have failed by themselves in steps of the request, which limit where it may go.
        self.deaths = Deaths()
        self.failed_prefill: set[Incarnation] = set()
        #: How many prefill workers have failed the request although they still run and do not shut down.
        self.prefill_failures = 0

    async def look_up(self) -> None:
        """Learns what each worker has cached now."""
        self.overlap = await self._cluster.overlap(self._hashes)

    def choose_decode(self, recovery: Recovery, now: float) -> Placement | None:
        """The best decode worker for the next attempt, of those that have not failed this request."""
        # Another layout may be another model, which must not go on with tokens that the client has from this one.
        may_change = self._cluster.policy.may_change_numerics and not recovery.waits_for_class(now)
        for numerics in recovery.home.choices(may_change=may_change):
            for excluded in recovery.exclusions:
                placement = self.choose("decode", excluded, recovery.home.layout, numerics)
                if placement is not None:
                    return placement
        return None

    def choose(
        self, tier: Tier, excluded: Collection[Incarnation], layout: KvLayout | None, numerics: str | None = None
    ) -> Placement | None:
        """The best worker of the tier for this request, or None without a candidate.

        Candidates have KV of this layout and this numerics class. None: any. A decode worker with copies of
        the request's blocks is the best, unless it is full.
        """
        demand = Demand(
            prompt_tokens=len(self._generation.prompt),
            sequences=self._generation.sampling.n,
            overlap=self.overlap,
            excluded=excluded,
        )
        workers = [each for each in self._cluster.ready(tier, layout) if numerics in (None, each.numerics_class)]
        workers = self._able(workers)
        if tier == "prefill":
            return choose_prefill(workers, demand, self._cluster.in_flight)
        return self._choose_copy(workers, demand) or choose_decode(workers, demand, self._cluster.in_flight)

    def choose_move(
        self, source: WorkerRecord, excluded: Collection[Incarnation], *, needs_room: bool
    ) -> Placement | None:
        """The best other decode worker for a request that leaves `source`.

        With `needs_room`, that worker also keeps blocks free, so that it does not itself ask to be left at once.
        """
        lengths = self._output.open_lengths
        demand = Demand(
            prompt_tokens=len(self._generation.prompt) + sum(lengths.values()),
            sequences=len(lengths),
            overlap=self.overlap,
            excluded={*excluded, incarnation_of(source)},
        )
        candidates = self._able(self._cluster.ready("decode", source.layout))
        candidates = [worker for worker in candidates if worker.numerics_class == source.numerics_class]
        if needs_room:
            candidates = [worker for worker in candidates if has_spare_blocks(worker, demand, self._cluster.in_flight)]
        placement = self._choose_copy(candidates, demand)
        placement = placement or choose_decode(candidates, demand, self._cluster.in_flight)
        return None if placement is None or (needs_room and placement.is_full) else placement

    def is_understood_by(self, worker: WorkerRecord) -> bool:
        """Whether the worker knows all of what the request asks for. An older one would ignore some of it."""
        sampling = self._generation.sampling
        return worker.sampling_version >= sampling.version and (worker.reads_grammars or not sampling.follows_text)

    @property
    def max_len(self) -> int:
        """Tokens of one choice at its end, with the prompt."""
        return len(self._generation.prompt) + self._generation.sampling.max_tokens

    def fits_on(self, worker: WorkerRecord) -> bool:
        """Whether the worker holds all that the request may need of it. A shorter one would cut the answer off."""
        needed = self.max_len if worker.tier == "decode" else len(self._generation.prompt) + 1
        return worker.max_model_len >= needed

    def _able(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """The workers that can do what the request asks for, and hold all of it.

        If no worker holds all of a request that fills the context, it takes decode workers with a shorter context.
        """
        workers = [each for each in workers if self.is_understood_by(each)]
        holding = [each for each in workers if self.fits_on(each)]
        if holding or not self._fills_context:
            return holding
        so_far = len(self._generation.prompt) + max(self._output.open_lengths.values(), default=0)
        return [each for each in workers if each.tier == "decode" and each.max_model_len > so_far]

    def _choose_copy(self, candidates: Sequence[WorkerRecord], demand: Demand) -> Placement | None:
        """The candidate with copies of the request's blocks."""
        copies = [worker for worker in candidates if incarnation_of(worker) == self.replica]
        placement = choose_decode(copies, demand, self._cluster.in_flight)
        if placement is None or placement.is_full:
            return None
        return replace(placement, why=f"has copies of the request's blocks; {placement.why}")

    def choose_prefill(self, decode: WorkerRecord | None, *, must_ask: bool = False) -> Placement | None:
        """The best prefill worker that has not failed this request, for this decode worker if any.

        A worker of another numerics class is chosen only where none of the decode worker's class is left. `must_ask`:
        the decode worker's ticket has no data address, so the worker has to ask for it.
        """
        return self._choose_prefill(self.failed_prefill, self.prefill_failures, decode, must_ask=must_ask)

    def choose_without_output(self, version: int) -> Placement | None:
        """The best prefill worker of at least this `SAMPLING_VERSION` that has not failed this request."""
        if not self._may_prefill(self.prefill_failures):
            return None
        workers = [each for each in self._cluster.ready("prefill") if each.sampling_version >= version]
        workers = [each for each in workers if self.fits_on(each)]
        demand = Demand(
            prompt_tokens=len(self._generation.prompt), sequences=1, overlap=self.overlap, excluded=self.failed_prefill
        )
        return choose_prefill(workers, demand, self._cluster.in_flight)

    @property
    def senders_ask(self) -> bool:
        """Whether prefill workers are ready, and all of them ask for data addresses."""
        ready = self._cluster.ready("prefill")
        return bool(ready) and all(each.asks_for_addresses for each in ready)

    def has_other_prefill(
        self, placement: Placement, error: PdserveError, decode: WorkerRecord, *, must_ask: bool = False
    ) -> bool:
        """Whether another prefill worker can take the prompt after this one has failed. `must_ask`: as above."""
        failed, failures = self.failed_prefill | {placement.incarnation}, self.prefill_failures + _is_fault(error)
        return self._choose_prefill(failed, failures, decode, must_ask=must_ask) is not None

    def _choose_prefill(
        self, failed: set[Incarnation], failures: int, decode: WorkerRecord | None, *, must_ask: bool
    ) -> Placement | None:
        if not self._may_prefill(failures):
            return None
        if decode is None:
            return self.choose("prefill", failed, None)
        # The decode worker may have changed its role in the meantime, and then takes requests of both tiers by turns.
        failed = failed | {incarnation_of(decode)}
        if must_ask:
            failed |= {incarnation_of(each) for each in self._cluster.ready("prefill") if not each.asks_for_addresses}
        same = self.choose("prefill", failed, decode.layout, decode.numerics_class)
        return same or self.choose("prefill", failed, decode.layout)

    def _may_prefill(self, failures: int) -> bool:
        # When this many workers that still run have failed, the prompt or the connection between the tiers is at fault.
        return self.deaths.may_reach("prefill") and (failures < MAX_PREFILL_FAILURES or self.deaths.tier is not None)

    def exclude_prefill(self, placement: Placement, error: PdserveError) -> None:
        """A prefill worker has failed, and gets no further attempt of this request."""
        self.failed_prefill.add(placement.incarnation)
        self.prefill_failures += _is_fault(error)


def _is_fault(error: PdserveError) -> bool:
    """Whether the error is a failure of a prefill worker that lives and does not shut down."""
    return not (is_gone(error) or isinstance(error, Draining))
