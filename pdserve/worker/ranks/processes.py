"""The processes of a worker's other ranks, managed by rank 0: started, sent requests, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import signal
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
from pdserve.worker.ranks.messages import HEADER_BYTES, reply_to
from pdserve.worker.ranks.split import config_of_rank
from pdserve.worker.ranks.startup import RankSetup, SetupReply, SetupState, receive_line, send_line

log = get_logger(__name__)

FOLLOWER_MODULE = "pdserve.worker.ranks.follower"
#: Followers end when their sockets are closed. A follower that has not ended after this time is killed.
END_S = 10.0
#: A follower that knows why start-up failed says so within this time.
REASON_S = 2.0
#: Signals that a process causes itself, by a fault or a failed check.
_OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


class RankProcess:
    """One of the other ranks, and the sockets that lead to it."""

    def __init__(self, rank: int, stage: int, device: str) -> None:
        """`stage`: descriptor of the shared stage."""
        self.rank = rank
        self._device = device
        self.steps, steps = socket.socketpair()
        self.copies, copies = socket.socketpair()
        passed = (steps.fileno(), copies.fileno(), stage)
        flags = ("-P",) if sys.flags.safe_path else ()
        command = [sys.executable, *flags, "-m", FOLLOWER_MODULE, *map(str, passed)]
        with steps, copies:
            self.process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
        self._one_request = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self._device})"

    def set_up(self, setup: RankSetup) -> None:
        """Sends the first message."""
        with contextlib.suppress(OSError):  # `expect` reports what happened.
            send_line(self.copies, setup.to_json())

    def expect(self, state: SetupState) -> None:
        """Waits until the follower reports `state`. Raises `SetupError` with what it reports instead."""
        line = receive_line(self.copies)
        if line is None:
            code = self.end(time.monotonic() + END_S)
            raise SetupError(self._explained(f"ended with exit code {code} while starting. Its log says why."))
        reply = SetupReply.from_json(line)
        if reply.state is SetupState.FAILED:
            raise SetupError(self._explained(reply.error))
        assert reply.state is state

    def complaint(self, deadline: float) -> str | None:
        """The error reported by `deadline` (`time.monotonic`, seconds), unless another rank's error caused it."""
        try:
            # A timeout of zero would mean non-blocking.
            line = receive_line(self.copies, timeout_s=max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            return None
        if line is None:
            return None
        reply = SetupReply.from_json(line)
        return self._explained(reply.error) if reply.error and not reply.is_consequence else None

    def _explained(self, error: str) -> str:
        return f"{str(self).capitalize()}: {error}"

    async def request_copy(self, request: bytes) -> None:
        """Returns when the follower has made the copy. Raises `PeerLost`. Belongs to one event loop."""
        async with self._one_request:
            try:
                if self._streams is None:
                    self._streams = await asyncio.open_connection(sock=self.copies)
                reader, writer = self._streams
                writer.write(request)
                reply = await reader.readexactly(HEADER_BYTES)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise PeerLost(f"{self} of this worker has ended") from error
            assert reply == reply_to(request), f"{self} replied to another request"

    def end(self, deadline: float) -> int:
        """Waits until the process ends; kills it at `deadline` (`time.monotonic`, seconds). Returns its exit code."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("rank_killed", rank=self.rank, reason="it did not end")
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """Closes the sockets, on which the follower ends."""
        self.steps.close()
        if self._streams is not None:
            self._streams[1].transport.abort()
        self.copies.close()


class RankProcesses:
    """All other ranks of a worker. Implements `pdserve.worker.ranks.rank0.Followers`."""

    def __init__(self, config: WorkerConfig, stage: int, rendezvous: Path, on_lost: Callable[[PeerLost], None]) -> None:
        """Starts the other ranks. `on_lost` is called, on a thread of its own, when one of them ends unexpectedly."""
        self._on_lost = on_lost
        self._closing = False
        self._lost: PeerLost | None = None
        self._all = [
            RankProcess(rank, stage, config_of_rank(config, rank, num_cores=1).device)
            for rank in range(1, config.tensor_parallel_size)
        ]
        for follower in self._all:
            name = f"{config.worker_id or 'worker'}-rank-{follower.rank}"
            follower.set_up(RankSetup(rank=follower.rank, name=name, rendezvous=str(rendezvous), config=config))
            threading.Thread(target=self._watch, args=(follower,), name=name, daemon=True).start()
        self.steps = [follower.steps for follower in self._all]

    def expect(self, state: SetupState) -> None:
        """Waits until all report `state`. Raises `SetupError` with what one reports instead."""
        with selectors.DefaultSelector() as selector:
            for follower in self._all:
                selector.register(follower.copies, selectors.EVENT_READ, follower)
            # Replies are not read rank after rank: on GPUs, the other ranks wait forever for a rank that has failed.
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    key.data.expect(state)

    def complaint(self) -> str | None:
        """The first error that a follower reports soon and that no other rank caused."""
        deadline = time.monotonic() + REASON_S
        for follower in self._all:
            if complaint := follower.complaint(deadline):
                return complaint
        return None

    def check(self) -> None:
        """Raises `PeerLost` as soon as a follower is known to have ended."""
        if self._lost is not None:
            raise self._lost

    def were_ended(self) -> bool:
        """Whether a follower was ended from outside, so that others failed because of that. Blocks, perhaps for 2 s.

        To be called after a rank has failed. An exception on one rank ends the others with exceptions, too.
        """
        deadline = time.monotonic() + REASON_S
        for follower in self._all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = follower.process.wait(max(0.0, deadline - time.monotonic()))
                if code < 0 and -code not in _OWN_SIGNALS:
                    return True
        return False

    async def request_copy(self, request: bytes) -> None:
        """Returns when every follower has made the copy, or never will. Raises `PeerLost`."""
        requests = (follower.request_copy(request) for follower in self._all)
        for outcome in await asyncio.gather(*requests, return_exceptions=True):
            if outcome is not None:
                raise outcome

    def close(self) -> None:
        """Ends the followers. The last step and the last copy must have ended."""
        self._closing = True
        for follower in self._all:
            follower.close()
        deadline = time.monotonic() + END_S
        for follower in self._all:
            follower.end(deadline)

    def _watch(self, follower: RankProcess) -> None:
        code = follower.process.wait()
        if self._closing:
            return
        log.error("rank_lost", rank=follower.rank, exit_code=code)
        error = PeerLost(f"{follower} of this worker ended with exit code {code}")
        # The error is set before `on_lost` is called, which may let a step end whose result is garbage.
        self._lost = error
        self._on_lost(error)
