"""The choices of a request: one sequence each, forked from its prompt. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from decode_svc.request import ScheduledRequest
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.sequence import Sampled, Sequence
from pdserve.engine.sequence_limits import SequenceLimits


def fork_choices(
    request: ScheduledRequest, first_tokens: Mapping[int, int], limits: SequenceLimits, blocks: BlockManager
) -> list[Sequence]:
    """A sequence for each choice, behind its first token, unless the choice was stopped or ends with that token.

    The sequence of a choice that another worker has started has all tokens that the client has of it. Their KV is
    computed again, as after a preemption, apart from leading blocks in the prefix cache. The prompt's own sequence
    becomes that of the first choice; the other choices share its blocks.
    """
    prompt = request.prompt_sequence
    going_on = [
        choice
        for choice, token in first_tokens.items()
        if choice not in request.stopped
        and limits.choice_tokens(prompt, choice, Sampled(token_id=token)).finish_reason is None
    ]
    if not going_on:
        return []
    # All forks are taken off the bare prompt before it grows into the first of the choices.
    sequences = [prompt, *(blocks.fork(prompt, choice) for choice in going_on[1:])]
    prompt.choice_index = going_on[0]
    for sequence in sequences:
        sequence.tokens.extend(request.output.get(sequence.choice_index, (first_tokens[sequence.choice_index],)))
        sequence.sampling = limits.sample_row(sequence, sequence.choice_index)
    for sequence in sequences if request.output else ():
        blocks.reuse_behind(sequence)
    return sequences
