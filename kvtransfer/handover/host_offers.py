"""Blocks in host memory that are offered to processes of the host, and copied from theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from kernels.cpu.digest import Blocks, can_digest, digest_blocks
from kvtransfer.handover.digest import DIGEST_BYTES, MessageDigest
from kvtransfer.handover.layer_groups import span_of
from kvtransfer.handover.memory import Bundle, Digests, MessageSpec, UncopiedBlocks
from kvtransfer.transport import Buffer
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import SharedMemory
from pdserve.base.tasks import run_to_completion

Starts = npt.NDArray[np.int64]

#: Bytes digested before the event loop gets a turn. Going to a thread and back costs more.
_YIELD_BYTES = 4 << 20


class _Found:
    """Implements `Digests`."""

    def __init__(self, digests: list[bytes]) -> None:
        self._digests = digests

    async def found(self) -> list[bytes]:
        return self._digests


class HostOffers:
    """Implements `OfferedMemory` and `OfferSource` for bundles of one block. Copies are made by a thread, in order."""

    run_bytes = (2 << 20, 16 << 20)
    is_bounded = False

    def __init__(self, memory: Buffer, layout: KvLayout, shared: SharedMemory | None) -> None:
        """`memory`: as that of `InPlaceMemory`. Raises: SetupError."""
        self.memories = [] if shared is None else [shared]
        self._memory = memory
        self._layout = layout
        self._start = 0 if shared is None else shared.offset_of(memory) or 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copies")
        if shared is not None:
            try:
                self._thread.submit(int)  # A process that cannot have the thread finds out now.
            except RuntimeError as error:
                raise SetupError(f"No thread can be started that copies blocks: {error}.") from error

    @property
    def shared(self) -> SharedMemory:
        return self.memories[0]

    def sources_for(self, end: DataEndpoint) -> Sequence[HostOffers]:
        return [self] if self.memories and end.can_read("") else []

    async def open(self) -> None:
        pass

    async def prepare(self, bundles: Sequence[Bundle], spec: MessageSpec) -> UncopiedBlocks:
        assert spec.after is None, "blocks in host memory are computed before they are reported"
        return UncopiedBlocks(self.starts(bundles, spec), partial(self.digests, bundles, spec))

    def block_bytes(self, spec: MessageSpec) -> int:
        span = self._span(spec)
        return int(span.stop - span.start)

    def starts(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Starts:
        """Where the blocks of messages begin in what is shared: int64 [blocks]."""
        return self._starts(bundles, spec) + self._start

    async def digests(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Digests:
        """The digests of messages."""
        starts, num_bytes, found = self._starts(bundles, spec), self.block_bytes(spec), list[bytes]()
        at_once = max(1, _YIELD_BYTES // num_bytes)
        for first in range(0, len(starts), at_once):
            found += _digests(Blocks(self._memory, starts[first : first + at_once]), num_bytes, spec.digest)
            await asyncio.sleep(0)
        return _Found(found)

    async def pull(self, source: Buffer, starts: Starts, bundles: Sequence[Bundle], spec: MessageSpec) -> list[bytes]:
        blocks, into = Blocks(source, starts), Blocks(self._memory, self._starts(bundles, spec))
        copy = _Copy(partial(_copied, blocks, into, self.block_bytes(spec), spec.digest))
        copying = asyncio.get_running_loop().run_in_executor(self._thread, copy.run)
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            if not copy.withdraw():
                await run_to_completion(copying)
            raise

    def _span(self, spec: MessageSpec) -> slice:
        return span_of(spec.layers, self._layout.groups[spec.kv_group].num_layers, self._layout.block_bytes)

    def _starts(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Starts:
        ids = np.fromiter((bundle[0] for bundle in bundles), np.int64, len(bundles))
        starts: Starts = ids * self._layout.block_bytes + self._span(spec).start
        return starts


class _Copy:
    """A copy that is withdrawn in time, or made whole."""

    def __init__(self, copy: Callable[[], list[bytes]]) -> None:
        self._copy = copy
        self._lock = threading.Lock()
        self._is_running = self._is_withdrawn = False

    def withdraw(self) -> bool:
        """Whether it was not started, and never will be."""
        with self._lock:
            self._is_withdrawn = not self._is_running
            return self._is_withdrawn

    def run(self) -> list[bytes]:
        """On the thread. The digests; none of a copy that was withdrawn."""
        with self._lock:
            if self._is_withdrawn:
                return []
            self._is_running = True
        return self._copy()


def _digests(blocks: Blocks, num_bytes: int, digest: MessageDigest) -> list[bytes]:
    if can_digest(num_bytes):
        return _rows(digest_blocks(blocks, num_bytes, digest.seed))
    return [digest(blocks.memory[start : start + num_bytes]) for start in blocks.starts.tolist()]


def _copied(source: Blocks, target: Blocks, num_bytes: int, digest: MessageDigest) -> list[bytes]:
    if can_digest(num_bytes):
        return _rows(digest_blocks(source, num_bytes, digest.seed, target=target))
    digests = []
    for start, own_start in zip(source.starts.tolist(), target.starts.tolist(), strict=True):
        block = target.memory[own_start : own_start + num_bytes]
        np.copyto(block, source.memory[start : start + num_bytes])
        digests.append(digest(block))
    return digests


def _rows(digests: Buffer) -> list[bytes]:
    together = digests.tobytes()
    return [together[first : first + DIGEST_BYTES] for first in range(0, len(together), DIGEST_BYTES)]
