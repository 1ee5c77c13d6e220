"""The task of one prompt, from the admission queue to its last token; errors stop here."""

from __future__ import annotations

from pdserve.base.errors import PdserveError
from pdserve.base.logs import enter_request, get_logger
from pdserve.model.tokenizer import Tokenizer
from router_svc.generation import Generation
from router_svc.records.events import Admitted, Ended
from router_svc.records.journal import Journal
from router_svc.request.delivery import Delivery
from router_svc.request.fair_order import QueueSlot
from router_svc.request.gate import Gate
from router_svc.request.losses import Losses
from router_svc.request.output import Output
from router_svc.request.placer import Placer
from router_svc.request.prompt_log import PromptLog
from router_svc.request.quarantine import Quarantine
from router_svc.request.running_prompt import RunningPrompt
from router_svc.request.saga import Saga
from router_svc.request.stream import DeltaStream
from router_svc.request.worker_messages import WorkerMessages
from router_svc.routing.cluster import Cluster, PrefixHashes
from router_svc.routing.home import Home
from router_svc.routing.in_flight import QueuedPrompt

log = get_logger(__name__)


class PromptTask:
    """Runs one prompt when its turn comes."""

    def __init__(
        self,
        generation: Generation,
        hashes: PrefixHashes,
        journal: Journal,
        gate: Gate,
        slot: QueueSlot,
        log: PromptLog | None = None,
    ) -> None:
        """`log`: where the output is kept for other routers, and where the output of another router is."""
        self._log = log
        self._generation = generation
        self._hashes = hashes
        self._journal = journal
        self._gate = gate
        self._slot = slot

    async def run(self, cluster: Cluster, tokenizer: Tokenizer, stream: DeltaStream, quarantine: Quarantine) -> None:
        """Returns when the prompt is complete or has failed. The error goes into the stream, after the tokens."""
        enter_request(self._generation.request_id, self._journal.record.trace)
        error: PdserveError | None = None
        try:
            output = Output(self._generation, tokenizer)
            if self._log is not None:
                await self._log.replay(self._generation, output, self._journal, stream)
            if not output.is_finished:
                await self._gate.wait_for_turn(self._slot)
                self._journal.append(Admitted())
                await self._run(cluster, output, stream, quarantine)
            await stream.wait_until_written()
            self._journal.append(Ended.finished(output.finish_reasons))
        except PdserveError as expected:
            error = expected
        except Exception as unexpected:  # noqa: BLE001 - the error boundary of a request: others continue
            log.error("request_broke", exc=unexpected)
            error = PdserveError("The request failed unexpectedly. The router's log has the traceback.")
        finally:
            self._gate.leave(self._slot)
        if error is not None:
            self._journal.append(Ended.failed(error))
        stream.end(error)

    async def _run(self, cluster: Cluster, output: Output, stream: DeltaStream, quarantine: Quarantine) -> None:
        generation = self._generation
        max_len = len(generation.prompt) + generation.sampling.max_tokens
        placer = Placer(generation, self._hashes, cluster, output, fills_context=max_len >= cluster.max_model_len(0))
        prompt = RunningPrompt(
            generation=generation,
            cluster=cluster,
            journal=self._journal,
            output=output,
            delivery=Delivery(generation, output, stream, self._journal, self._log),
            placer=placer,
            losses=Losses(generation, cluster, self._journal, placer, quarantine),
            messages=WorkerMessages(generation, output, self._journal, placer, cluster.in_flight.router_id),
            queued=QueuedPrompt(cluster.in_flight),
        )
        log = self._log if output.has_tokens else None
        async with prompt.retained:
            await Saga(prompt, Home() if log is None else log.home).run()
