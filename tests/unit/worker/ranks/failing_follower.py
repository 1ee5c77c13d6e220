"""`python -m tests.unit.worker.ranks.failing_follower STEPS COPIES STAGE`: fails as the model's directory is named."""

from __future__ import annotations

import os
import signal
import socket
import sys
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from pdserve.worker.ranks.order import Order, receive_line, send_line


def main() -> None:
    """Reads its order, then fails."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    steps, copies, _ = map(int, sys.argv[1:])
    with socket.socket(fileno=steps), socket.socket(fileno=copies) as stream:
        message = receive_line(stream)
        assert message is not None
        order = Order.from_json(message)
        how = order.config.model_dir.name
        if how == "never-ends":
            signal.pause()
        if how == "ends-at-once":
            sys.exit(7)
        if how == "cannot-load":
            send_line(stream, {"error": "no memory"})
            sys.exit(1)
        send_line(stream, {"state": "here"})
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        store = c10d.FileStore(order.rendezvous, 2)
        group = c10d.ProcessGroupGloo(store, order.rank, 2, options)
        if how == "cannot-agree":
            send_line(stream, {"error": "no room for one block"})
        os._exit(group.rank())


if __name__ == "__main__":
    main()
