"""`python -m tests.unit.worker.ranks.failing_follower STEPS COPIES STAGE`: fails in the way the model's name says.

It imports torch, which takes a second, only for the ways that need it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from pdserve.worker.ranks.startup import RankSetup, SetupReply, SetupState, receive_line, send_line


def main() -> None:
    """Reads its setup, then fails."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(60)  # A failed test leaves no process behind.
    steps, copies, _ = map(int, sys.argv[1:])
    with socket.socket(fileno=steps), socket.socket(fileno=copies) as stream:
        message = receive_line(stream)
        assert message is not None
        setup = RankSetup.from_json(message)
        how = setup.config.model_dir.name
        if how == "never-ends":
            signal.pause()
        if how == "closes-its-socket":
            stream.close()
            signal.pause()
        if how == "exits-at-once":
            sys.exit(7)
        if how == "cannot-load":
            send_line(stream, SetupReply(state=SetupState.FAILED, error="no memory").to_json())
            sys.exit(1)
        send_line(stream, SetupReply(state=SetupState.STARTED).to_json())
        if how == "last-fails" and setup.rank == setup.config.tensor_parallel_size - 1:
            os._exit(7)
        if how == "last-fails":
            signal.pause()
        if how == "replies-to-another":
            from pdserve.worker.ranks.messages import MessageKind, MessageReader, encode

            request = MessageReader(stream).receive()
            assert request is not None
            stream.sendall(encode(MessageKind.DONE, request.number + 1))
            signal.pause()
        import torch

        from pdserve.worker.ranks.process_group import form_group

        form_group(Path(setup.rendezvous), setup.rank, setup.config.tensor_parallel_size, torch.device("cpu"))
        if how == "cannot-agree":
            # The others only see its consequence.
            last = setup.rank == setup.config.tensor_parallel_size - 1
            error = "no memory for one block" if last else "cannot reach the others"
            send_line(stream, SetupReply(state=SetupState.FAILED, error=error, is_consequence=not last).to_json())
        os._exit(1)


if __name__ == "__main__":
    main()
