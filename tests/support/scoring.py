"""Scores of prompts from a prefill worker's engine with a real decoder."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams, TokenLogprobs
from pdserve.model.decoder import Decoder
from prefill_svc.request import PrefillJob
from tests.support.prefill_engine import PrefillEngine, rounded


def scored_by_a_worker(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    *,
    step_tokens: int = 40,
    scored_tokens: int = 13,
    alternatives: int = 3,
    unscored: Sequence[list[int]] = (),
) -> list[list[TokenLogprobs]]:
    """The scores of each prompt, all of which are computed at once, with others that are `unscored`."""
    num_tokens = sum(rounded(len(prompt)) for prompt in (*prompts, *unscored))
    engine = PrefillEngine(decoder, num_tokens, step_tokens=step_tokens, scored_tokens=scored_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=alternatives)
    for number, prompt in enumerate((*prompts, *unscored)):
        engine.scheduler.add(
            PrefillJob(
                request_id=RequestId(str(number)),
                prompt_token_ids=prompt,
                params=params,
                hash_key=bytes(32),
                is_scored=number < len(prompts),
            )
        )
    found: list[list[TokenLogprobs]] = [[] for _ in prompts]
    for events in engine.run():
        for scores in events.scores:
            assert scores.first == len(found[int(scores.request_id)]) + 1
            found[int(scores.request_id)] += scores.logprobs
    return found
