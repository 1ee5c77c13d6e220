"""One request through the whole cluster before it is reported as ready.

What happens once per process or per pair of workers is then done: connections, page faults, set-up on first use. That
cost the first request a fifth of its time. Nothing of it is recorded, and nobody finds its prompt in a prefix cache.
"""

from __future__ import annotations

import asyncio
import secrets

from pdserve.base.errors import PdserveError
from pdserve.base.ids import RequestId
from pdserve.base.logs import get_logger
from pdserve.base.sampling import SamplingParams
from pdserve.redis.store import Store
from router_svc.generation import Generation, TextRules
from router_svc.records.metrics import RouterMetrics
from router_svc.records.recent_records import RecentRecords
from router_svc.records.request_store import RequestStore
from router_svc.request.output import ChoiceDelta
from router_svc.request.requests import Recorders, Requests

log = get_logger(__name__)

_OUTPUT_TOKENS = 3
#: Tokens beyond `--local-prefill-threshold`, so that the prompt is handed over. A longer prompt only takes longer.
_TOKENS_BEYOND_THRESHOLD, _MAX_PROMPT_TOKENS = 16, 256
#: A cluster that is not able to answer by then is reported as ready all the same, with a warning.
_TIMEOUT_S = 10.0


def unrecorded(store: Store) -> Recorders:
    """Recorders that nobody reads."""
    return Recorders(metrics=RouterMetrics(model_name=""), recent=RecentRecords(1), store=RequestStore(store))


def rehearsal(*, local_prefill_threshold: int, max_model_len: int, vocab_size: int) -> Generation:
    """A short greedy request that the prefill tier computes."""
    longest = min(_MAX_PROMPT_TOKENS, max_model_len - _OUTPUT_TOKENS)
    num_tokens = max(1, min(local_prefill_threshold + _TOKENS_BEYOND_THRESHOLD, longest))
    request_id = RequestId(f"rehearsal-{secrets.token_hex(8)}")
    return Generation(
        request_id=request_id,
        worker_request_id=request_id,
        prompt=tuple(index % vocab_size for index in range(num_tokens)),
        sampling=SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True),
        text=TextRules(),
        cache_salt=request_id.encode(),
        endpoint="rehearsal",
    )


async def rehearse(requests: Requests, generation: Generation) -> None:
    """Runs it. A failure is logged: requests that follow have retries and errors of their own."""

    async def write(_: list[ChoiceDelta]) -> None:
        pass

    try:
        async with asyncio.timeout(_TIMEOUT_S), requests.run([generation]) as stream:
            await stream.write_to(write)
    except (PdserveError, TimeoutError) as error:
        log.warning("rehearsal_failed", error=error)
