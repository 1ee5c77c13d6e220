"""Rank 0's side of a worker with several ranks: it starts the others, and has them do what it does.

Rank 0 alone schedules, samples and speaks to other processes. Each step's batch goes to all others before rank 0 begins
with it, so all ranks launch the same kernels in the same order; they meet in `kernels.ranks.TorchRanks`. Blocks that
are handed over meet in the stage, to and from which every rank copies its own heads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.decoder import LayerListener
from kernels.ranks import Group, TorchRanks
from kvtransfer.digest import HOST_DIGEST
from kvtransfer.memory import Bundle, Part
from kvtransfer.staging import Staged
from pdserve.base.errors import PdserveError, PeerLost, SetupError
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.base.moment import Moment
from pdserve.base.tasks import to_its_end
from pdserve.base.worker_config import WorkerConfig
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import Decoder, StepCache, TokenSampler
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.model.batch import Batch
from pdserve.model.config import ModelConfig
from pdserve.model.sharding import rank_config
from pdserve.worker.blocks import CacheCopies, Stage, stage_bytes
from pdserve.worker.cores import num_cores
from pdserve.worker.part import ModelPart, load_part
from pdserve.worker.ranks.group import agree, form_group
from pdserve.worker.ranks.messages import HEADER_BYTES, Copy, Kind, Mark, StepWriter
from pdserve.worker.ranks.order import Order, receive_line, send_line
from pdserve.worker.ranks.split import config_of_rank
from pdserve.worker.ranks.stage import heads_of_rank, make_stage, map_stage

log = get_logger(__name__)

_MODULE = "pdserve.worker.ranks.follower"
#: Followers end when their sockets are closed; one that does not is killed.
_END_S = 10.0
#: A follower that has ended has said why before, or never will.
_REASON_S = 2.0


class Follower:
    """One of the other ranks: its process, and the sockets that lead to it."""

    def __init__(self, rank: int, stage: int) -> None:
        self.rank = rank
        self.steps, steps = socket.socketpair()
        self._copies, copies = socket.socketpair()
        passed = (steps.fileno(), copies.fileno(), stage)
        flags = ("-P",) if sys.flags.safe_path else ()
        with steps, copies:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-m", _MODULE, *map(str, passed)], pass_fds=passed, stdin=subprocess.DEVNULL
            )
        self._turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def order(self, order: Order) -> None:
        """The first thing it is told."""
        with contextlib.suppress(OSError):  # `expect` says what happened.
            send_line(self._copies, order.to_json())

    def expect(self, state: str) -> None:
        """Waits until it says so. Raises `SetupError` with what it says instead, or that it ended."""
        answer = receive_line(self._copies)
        if answer is None:
            raise SetupError(f"Rank {self.rank} ended with exit code {self.process.wait()} while it was started.")
        if "error" in answer:
            raise SetupError(f"Rank {self.rank}: {answer['error']}")
        assert answer == {"state": state}

    def complaint(self) -> str | None:
        """What it says has gone wrong, if it says anything soon."""
        try:
            answer = receive_line(self._copies, timeout_s=_REASON_S)
        except TimeoutError:
            return None
        return None if answer is None else answer.get("error")

    async def ask(self, request: bytes) -> None:
        """Returns when it has done what was asked. Raises `PeerLost`. Belongs to one event loop."""
        async with self._turn:
            try:
                if self._streams is None:
                    self._streams = await asyncio.open_connection(sock=self._copies)
                reader, writer = self._streams
                writer.write(request)
                await reader.readexactly(HEADER_BYTES)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise PeerLost(f"rank {self.rank} of this worker has ended") from error

    def close(self) -> None:
        """Lets it end."""
        self.steps.close()
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._copies.close()


class Team:
    """All ranks of one worker, seen by the first."""

    def __init__(self, config: WorkerConfig, device: torch.device) -> None:
        """Starts the followers. Raises `SetupError` for a model that so many ranks cannot split."""
        self._size = config.tensor_parallel_size
        rank_config(ModelConfig.from_dir(config.model_dir), self._size)
        self._config = config_of_rank(config, 0, num_cores=num_cores())
        self._device = device
        self._closing = False
        self._lost: PdserveError | None = None
        self._on_lost: Callable[[PdserveError], None] = lambda error: None
        self._group: Group | None = None
        self._number = 0
        #: The last step whose result rank 0 has seen.
        self._ended = 0
        self._directory = tempfile.TemporaryDirectory(prefix="pdserve-ranks-")
        self._rendezvous = Path(self._directory.name, "rendezvous")
        self._stage = make_stage(config.staging_memory)
        self._followers = [Follower(rank, self._stage) for rank in range(1, self._size)]
        for follower in self._followers:
            name = f"{config.worker_id or 'worker'}-rank-{follower.rank}"
            order = Order(rank=follower.rank, name=name, rendezvous=str(self._rendezvous), config=config)
            follower.order(order)
            threading.Thread(target=self._watch, args=(follower,), name=name, daemon=True).start()
        self._steps = StepWriter([follower.steps for follower in self._followers])

    def load(self) -> ModelPart:
        """Rank 0's part, when all have loaded theirs. Blocks. Raises `SetupError`."""
        for follower in self._followers:
            follower.expect("here")
        try:
            group = self._group = form_group(self._rendezvous, 0, self._size, self._device)
            part = load_part(
                self._config,
                self._device,
                ranks=TorchRanks(group),
                agree=lambda budget: agree(group, self._device, budget),
            )
        except (PdserveError, RuntimeError) as error:
            # What rank 0 sees is often that another is gone.
            for follower in self._followers:
                if complaint := follower.complaint():
                    raise SetupError(f"Rank {follower.rank}: {complaint}") from error
            if isinstance(error, PdserveError):
                raise
            raise SetupError(f"The ranks do not work together: {error}.") from error
        for follower in self._followers:
            follower.expect("ready")
        return part

    # The step thread.
    def leads(self, decoder: Decoder) -> Decoder:
        """The decoder, with all ranks."""
        return _LeadingDecoder(self, decoder)

    def watches(self, sampler: TokenSampler) -> TokenSampler:
        """The sampler; from what it gives follows that a step has ended."""
        return _WatchedSampler(self, sampler)

    def leads_cache(self, own: KvCache) -> StepCache:
        """The cache, with the blocks of all ranks."""
        return _LeadingCache(self, own)

    def begin_copies(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Has the others copy their blocks."""
        self._number += 1
        self._steps.copy_blocks(self._number, pairs)

    def begin_forward(self, batch: Batch, *, notes_layers: bool) -> None:
        """Has the others compute it."""
        self._number += 1
        self._steps.forward(self._number, batch, notes_layers=notes_layers)

    @property
    def number(self) -> int:
        """Of the step that was begun last."""
        return self._number

    def note_end(self) -> None:
        """All that has begun has ended."""
        self._ended = self._number

    # The event loop.
    def block_memory(self, layout: KvLayout, own: KvCache, staging_bytes: int) -> Staged:
        """Blocks of all heads. Raises `SetupError`."""
        size = stage_bytes(layout, staging_bytes)
        stage = map_stage(self._stage, size, self._device)
        part = Stage(stage, layout, own.tensor.dtype, heads_of_rank(layout, 0, self._size))
        return Staged(_RankCopies(self, own, part), stage.numpy(), layout.block_bytes)

    @property
    def ended(self) -> Mark:
        """Rank 0 has seen the result of all steps up to here."""
        return Mark(self._ended)

    async def copy_on_others(self, kind: Kind, copy: Copy) -> None:
        """Has the others copy. Raises `PeerLost`."""
        request = copy.encode(kind)
        answers = await asyncio.gather(*(each.ask(request) for each in self._followers), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer

    def watch(self, on_lost: Callable[[PdserveError], None]) -> None:
        """Calls it, on any thread, when a rank is lost: the worker cannot go on."""
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def close(self) -> None:
        """Ends the other ranks. No step is computed any more, and nothing copied."""
        self._closing = True
        for follower in self._followers:
            follower.close()
        for follower in self._followers:
            try:
                follower.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.warning("rank_killed", rank=follower.rank, reason="it did not end")
                follower.process.kill()
                follower.process.wait()
        self._group = None
        os.close(self._stage)
        self._directory.cleanup()

    # Inside.
    def _watch(self, follower: Follower) -> None:
        code = follower.process.wait()
        if self._closing:
            return
        log.error("rank_lost", rank=follower.rank, exit_code=code)
        self._lost = PeerLost(f"rank {follower.rank} of this worker ended with exit code {code}")
        if self._device.type == "cuda" and self._group is not None:
            # Whoever waits for it on the GPU would wait for ever. Gloo sees that a connection has ended.
            self._group.abort()
        self._on_lost(self._lost)


class _LeadingDecoder:
    def __init__(self, team: Team, decoder: Decoder) -> None:
        self._team = team
        self._decoder = decoder

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self._team.begin_forward(batch, notes_layers=on_layer is not None)
        return self._decoder.forward(batch, kv_cache, on_layer)


class _LeadingCache:
    """Implements `pdserve.engine.runner.StepCache`."""

    def __init__(self, team: Team, own: KvCache) -> None:
        self._team = team
        self._own = own
        self.tensor = own.tensor
        self.layout = own.layout

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._team.begin_copies(pairs)
        self._own.copy_blocks(pairs)

    def moment(self, num_layers: int) -> RankMoment:
        return RankMoment(Mark(self._team.number, num_layers), self._own.moment(num_layers))


@dataclass(frozen=True, slots=True)
class RankMoment:
    """A moment of rank 0, and what the others have to have written by then."""

    mark: Mark
    own: Moment | None

    def wait(self) -> None:
        """As `Moment.wait`, of rank 0."""
        if self.own is not None:
            self.own.wait()


class _WatchedSampler:
    def __init__(self, team: Team, sampler: TokenSampler) -> None:
        self._team = team
        self._sampler = sampler

    def sample(self, logits: Tensor, rows: Sequence[SampleRow], logits_rows: Sequence[int]) -> list[SampleResult]:
        results = self._sampler.sample(logits, rows, logits_rows)
        self._team.note_end()
        return results

    def settle(self) -> None:
        self._sampler.settle()
        self._team.note_end()


class _RankCopies:
    """Implements `kvtransfer.staging.BlockCopies`: a block is there when every rank has copied its heads."""

    digest = HOST_DIGEST

    def __init__(self, team: Team, own: KvCache, stage: Stage) -> None:
        self._team = team
        self._own = CacheCopies(own, stage)

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        assert part.after is None or isinstance(part.after, RankMoment)
        mark = self._team.ended if part.after is None else part.after.mark
        copy = Copy(bundles=bundles, slots=slots, layers=part.layers, after=mark)
        return await self._all(self._own.read(bundles, slots, part), self._team.copy_on_others(Kind.READ_BLOCKS, copy))

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        copy = Copy(bundles=bundles, slots=slots, layers=part.layers, after=self._team.ended)
        return await self._all(
            self._own.write(bundles, slots, part), self._team.copy_on_others(Kind.WRITE_BLOCKS, copy)
        )

    async def _all(self, own: Awaitable[list[bytes]], others: Awaitable[None]) -> list[bytes]:
        outcomes = await to_its_end(asyncio.gather(own, others, return_exceptions=True))
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return []
