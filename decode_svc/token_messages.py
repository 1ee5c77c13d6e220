"""Tokens of one or several steps as messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdserve.base.sampling import ChoiceTokens
from pdserve.base.wire import tokens_to_wire
from pdserve.engine.step import RequestTokens
from pdserve.v1 import decode_pb2 as pb

#: Maximum number of tokens and log-probabilities in one message. A router handles a message in one piece, and a larger
#: one would hold up its other streams. Thousands of tokens wait here for a client that reads nothing for a while.
MAX_MESSAGE_ENTRIES = 512


def token_messages(new: RequestTokens, later: Iterable[RequestTokens]) -> Iterator[pb.DecodeTokens]:
    """Messages with the tokens of a step, and of as many later steps as fit.

    A message has at most `MAX_MESSAGE_ENTRIES` entries, unless a single choice has more.
    """
    choices = list(new.choices)
    entries = sum(map(_entries, choices))
    if entries < MAX_MESSAGE_ENTRIES:
        for each in later:
            choices.extend(each.choices)
            entries += sum(map(_entries, each.choices))
            if entries >= MAX_MESSAGE_ENTRIES:
                break
    first = entries = 0
    for position, choice in enumerate(choices):
        entries += _entries(choice)
        if entries > MAX_MESSAGE_ENTRIES and position > first:
            yield pb.DecodeTokens(choices=map(tokens_to_wire, choices[first:position]))
            first, entries = position, _entries(choice)
    yield pb.DecodeTokens(choices=map(tokens_to_wire, choices[first:]))


def _entries(tokens: ChoiceTokens) -> int:
    return len(tokens.token_ids) + sum(1 + len(entry.top_ids) for entry in tokens.logprobs)
