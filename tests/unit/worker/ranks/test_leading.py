"""Rank 0 has the others do what it does, and tells nothing that was computed without one of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pdserve.base.errors import PeerLost
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.worker.ranks.leading import Lead
from pdserve.worker.ranks.messages import Mark


class Others:
    """Other ranks, of which one may be lost; they are told nothing."""

    steps: Sequence[socket.socket] = ()

    def __init__(self) -> None:
        self.lost: PeerLost | None = None

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    async def ask(self, request: bytes) -> None:
        raise AssertionError


class Sampler:
    """Draws, and meanwhile a rank is lost."""

    def __init__(self, others: Others, lost: PeerLost | None) -> None:
        self._others = others
        self._lost = lost

    def sample(self, logits: Tensor, rows: Sequence[SampleRow], logits_rows: Sequence[int]) -> list[SampleResult]:
        self._others.lost = self._lost
        return []

    def settle(self) -> None:
        self._others.lost = self._lost


@pytest.mark.parametrize("ends", ["sample", "settle"])
def test_what_was_drawn_without_a_rank_is_not_told(ends: str) -> None:
    others = Others()
    lead = Lead(others)
    lead.begin_copies([])
    sampler = lead.sampler(Sampler(others, PeerLost("rank 1 is lost")))
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        sampler.settle() if ends == "settle" else sampler.sample(torch.zeros(1, 9), [], [0])
    assert lead.ended == Mark(0)


@pytest.mark.parametrize("ends", ["sample", "settle"])
def test_a_step_has_ended_when_its_result_is_there(ends: str) -> None:
    others = Others()
    lead = Lead(others)
    sampler = lead.sampler(Sampler(others, None))
    for number in (1, 2):
        lead.begin_copies([])
        assert lead.ended == Mark(number - 1)
        sampler.settle() if ends == "settle" else sampler.sample(torch.zeros(1, 9), [], [0])
        assert lead.ended == Mark(number)
