"""Embeddings of prompts from a prefill worker's engine with a real decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.base.ids import RequestId
from pdserve.base.pooling import Pooling
from pdserve.base.sampling import SamplingParams
from pdserve.model.decoder import Decoder
from prefill_svc.request import PrefillJob
from tests.support.prefill_engine import PrefillEngine, rounded

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


def pooled_by_a_worker(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    pooling: Pooling,
    *,
    step_tokens: int = 40,
    others: Sequence[list[int]] = (),
    cached: Sequence[list[int]] = (),
) -> list[bytes]:
    """The embedding of each prompt, all of which are computed at once, with `others` that get a token.

    The blocks of `cached` are in the cache before.
    """
    every = [*cached, *others, *prompts]
    engine = PrefillEngine(decoder, sum(rounded(len(prompt)) for prompt in every), step_tokens=step_tokens)
    found: dict[RequestId, bytes] = {}

    def add(name: str, prompt: list[int], pooling: Pooling | None = None) -> None:
        engine.scheduler.add(
            PrefillJob(
                request_id=RequestId(name),
                prompt_token_ids=prompt,
                params=_PARAMS,
                hash_key=bytes(32),
                pooling=pooling,
            )
        )

    def run() -> None:
        for events in engine.run():
            found.update((event.request_id, event.values) for event in events.embeddings)

    for number, prompt in enumerate(cached):
        add(f"cached {number}", prompt)
    run()
    for number in range(max(len(prompts), len(others))):
        if number < len(others):
            add(f"other {number}", others[number])
        if number < len(prompts):
            add(f"pooled {number}", prompts[number], pooling)
    run()
    assert len(found) == len(prompts)
    return [found[RequestId(f"pooled {number}")] for number in range(len(prompts))]


def vector(values: bytes) -> npt.NDArray[np.float32]:
    """The numbers of an embedding."""
    return np.frombuffer(values, "<f4")
