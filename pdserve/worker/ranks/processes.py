"""The processes of a worker's other ranks, as rank 0 has them: started, asked, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.base.errors import PeerLost, SetupError
from pdserve.base.logs import get_logger
from pdserve.worker.config import WorkerConfig
from pdserve.worker.ranks.messages import HEADER_BYTES, answer_to
from pdserve.worker.ranks.split import config_of_rank
from pdserve.worker.ranks.startup import RankSetup, SetupReply, receive_line, send_line

log = get_logger(__name__)

_MODULE = "pdserve.worker.ranks.follower"
#: Followers end when their sockets are closed; one that does not is killed.
_END_S = 10.0
#: A follower that has ended has said why before, or never will.
_REASON_S = 2.0


class RankProcess:
    """One of the other ranks, and the sockets that lead to it."""

    def __init__(self, rank: int, stage: int, device: str) -> None:
        self.rank = rank
        self._device = device
        self.steps, steps = socket.socketpair()
        self.copies, copies = socket.socketpair()
        passed = (steps.fileno(), copies.fileno(), stage)
        flags = ("-P",) if sys.flags.safe_path else ()
        with steps, copies:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-m", _MODULE, *map(str, passed)], pass_fds=passed, stdin=subprocess.DEVNULL
            )
        self._turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self._device})"

    def order(self, order: RankSetup) -> None:
        """The first thing it is told."""
        with contextlib.suppress(OSError):  # `expect` says what happened.
            send_line(self.copies, order.to_json())

    def expect(self, state: str) -> None:
        """Waits until it says so. Raises `SetupError` with what it says instead, or that it ended."""
        line = receive_line(self.copies)
        if line is None:
            code = self.end(time.monotonic() + _END_S)
            raise SetupError(self.says(f"ended with exit code {code} while it was started."))
        answer = SetupReply(**line)
        if answer.error:
            raise SetupError(self.says(answer.error))
        assert answer.state == state

    def complaint(self, deadline: float) -> str | None:
        """What it says has gone wrong, if it says anything of its own until then, by `time.monotonic`."""
        try:
            # Zero is another thing.
            line = receive_line(self.copies, timeout_s=max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            return None
        answer = SetupReply() if line is None else SetupReply(**line)
        return self.says(answer.error) if answer.error and not answer.hearsay else None

    def says(self, error: str) -> str:
        """The error, with the rank whose it is."""
        return f"{str(self).capitalize()}: {error}"

    async def ask(self, request: bytes) -> None:
        """Returns when it has done what was asked. Raises `PeerLost`. Belongs to one event loop."""
        async with self._turn:
            try:
                if self._streams is None:
                    self._streams = await asyncio.open_connection(sock=self.copies)
                reader, writer = self._streams
                writer.write(request)
                answer = await reader.readexactly(HEADER_BYTES)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise PeerLost(f"{self} of this worker has ended") from error
            assert answer == answer_to(request), f"{self} answers something else"

    def end(self, deadline: float) -> int:
        """Its exit code, once it has ended, which it is to do until then, by `time.monotonic`."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("rank_killed", rank=self.rank, reason="it did not end")
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """Lets it end."""
        self.steps.close()
        if self._streams is not None:
            self._streams[1].transport.abort()
        self.copies.close()


class RankProcesses:
    """All of them."""

    def __init__(self, config: WorkerConfig, stage: int, rendezvous: Path, on_lost: Callable[[PeerLost], None]) -> None:
        """Starts them. `on_lost` is called, on a thread of its own, when one has ended that was not told to."""
        self._on_lost = on_lost
        self._closing = False
        self._lost: PeerLost | None = None
        self._all = [
            RankProcess(rank, stage, config_of_rank(config, rank, num_cores=1).device)
            for rank in range(1, config.tensor_parallel_size)
        ]
        for each in self._all:
            name = f"{config.worker_id or 'worker'}-rank-{each.rank}"
            each.order(RankSetup(rank=each.rank, name=name, rendezvous=str(rendezvous), config=config))
            threading.Thread(target=self._watch, args=(each,), name=name, daemon=True).start()
        self.steps = [each.steps for each in self._all]

    def expect(self, state: str) -> None:
        """Waits until all say so. Raises `SetupError` with what one says instead, or that it ended."""
        with selectors.DefaultSelector() as selector:
            for each in self._all:
                selector.register(each.copies, selectors.EVENT_READ, each)
            # Not one after the other: on GPUs the others wait for ever for one that has failed.
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    key.data.expect(state)

    def complaint(self) -> str | None:
        """What the first of them that says anything of its own soon says has gone wrong."""
        deadline = time.monotonic() + _REASON_S
        for each in self._all:
            if complaint := each.complaint(deadline):
                return complaint
        return None

    def check(self) -> None:
        """Raises `PeerLost` from the moment on at which one is known to have ended."""
        if self._lost is not None:
            raise self._lost

    async def ask(self, request: bytes) -> None:
        """Returns when all have done what was asked, or will not. Raises `PeerLost`."""
        answers = await asyncio.gather(*(each.ask(request) for each in self._all), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer

    def close(self) -> None:
        """Ends them. No step is computed any more, and nothing copied."""
        self._closing = True
        for each in self._all:
            each.close()
        deadline = time.monotonic() + _END_S
        for each in self._all:
            each.end(deadline)

    def _watch(self, each: RankProcess) -> None:
        code = each.process.wait()
        if self._closing:
            return
        log.error("rank_lost", rank=each.rank, exit_code=code)
        error = PeerLost(f"{each} of this worker ended with exit code {code}")
        # First: what `on_lost` does may let a step end that has computed rubbish.
        self._lost = error
        self._on_lost(error)
