"""The message with which a router starts a request on a decode worker."""

from __future__ import annotations

import asyncio
import secrets

from decode_svc.request import DecodeJob
from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import LayoutMismatch
from pdserve.base.ids import RequestId, RouterId
from pdserve.base.sampling import SamplingParams
from pdserve.model.thinking import OutputGrammar
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.worker import Worker

#: Size of the salt of a request whose blocks no other request may reuse.
_PRIVATE_SALT_BYTES = 32


def job_of(worker: Worker, start: pb.DecodeStart, params: SamplingParams, grammar: OutputGrammar | None) -> DecodeJob:
    """The request, with its parameters as read and their grammar. Raises: LayoutMismatch."""
    prompt, layout = tuple(start.prompt_token_ids), worker.model.layout
    if start.is_moving and layout.windows != (None,):
        raise LayoutMismatch("KV of several groups, or of a window, cannot be moved. Compute it again.")
    # A stranger who is accepted for now may send any blocks: no other request may find them.
    salt = secrets.token_bytes(_PRIVATE_SALT_BYTES) if worker.seals.accepts_strangers else start.cache_salt
    key = worker.hash_key(salt)
    return DecodeJob(
        request_id=RequestId(start.ref.request_id),
        attempt=start.ref.attempt,
        prompt_token_ids=prompt,
        params=params,
        grammar=grammar,
        hash_key=key,
        hashes=hash_blocks(key, prompt, layout.block_size),
        local_prefill_threshold=start.local_prefill_threshold,
        output={each.choice_index: tuple(each.token_ids) for each in start.output if not each.is_over},
        over=frozenset(each.choice_index for each in start.output if each.is_over),
        is_moving=start.is_moving,
        senders_ask=start.senders_ask,
        router_id=RouterId(start.ref.router_id),
        is_alone=start.ref.alone,
        is_best_effort=start.ref.best_effort,
        arrived_at=asyncio.get_running_loop().time() - start.ref.waited_ms / 1000,
    )
