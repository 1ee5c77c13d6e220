"""`python -m tests.unit.worker.ranks.failing_follower STEPS COPIES STAGE`: fails as the model's directory is named."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import torch

from pdserve.worker.ranks.messages import MessageKind, MessageReader, encode
from pdserve.worker.ranks.process_group import form_group
from pdserve.worker.ranks.startup import RankSetup, SetupReply, receive_line, send_line


def main() -> None:
    """Reads its order, then fails."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(60)  # Whatever becomes of the test.
    steps, copies, _ = map(int, sys.argv[1:])
    with socket.socket(fileno=steps), socket.socket(fileno=copies) as stream:
        message = receive_line(stream)
        assert message is not None
        order = RankSetup.from_json(message)
        how = order.config.model_dir.name
        if how == "never-ends":
            signal.pause()
        if how == "says-nothing-more":
            stream.close()
            signal.pause()
        if how == "ends-at-once":
            sys.exit(7)
        if how == "cannot-load":
            send_line(stream, SetupReply(error="no memory").to_json())
            sys.exit(1)
        send_line(stream, SetupReply(state="here").to_json())
        if how == "last-fails" and order.rank == order.config.tensor_parallel_size - 1:
            os._exit(7)
        if how == "last-fails":
            signal.pause()
        if how == "answers-another":
            asked = MessageReader(stream).receive()
            assert asked is not None
            stream.sendall(encode(MessageKind.DONE, asked.number + 1))
            signal.pause()
        form_group(Path(order.rendezvous), order.rank, order.config.tensor_parallel_size, torch.device("cpu"))
        if how == "cannot-agree":
            # The first one has only heard of it.
            last = order.rank == order.config.tensor_parallel_size - 1
            error = "no room for one block" if last else "does not reach the others"
            send_line(stream, SetupReply(error=error, hearsay=not last).to_json())
        os._exit(1)


if __name__ == "__main__":
    main()
