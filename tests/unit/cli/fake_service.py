"""A small process for supervisor tests: `fake_service.py STEP...`, steps carried out in order."""

import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading


def notify(text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(text.encode(), "\0" + os.environ["NOTIFY_SOCKET"].removeprefix("@"))


def main() -> None:
    for step in sys.argv[1:]:
        name, _, value = step.partition("=")
        match name:
            case "notify":
                notify(value)
            case "print":
                print(value, flush=True)
            case "variable":
                print(os.environ[value], flush=True)
            case "cached":
                print(pkgutil.resolve_name(value).cache_info().currsize, flush=True)
            case "ignore-sigterm":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "grandchild":
                helper = subprocess.Popen([sys.executable, __file__, "forever"])
                notify(f"STATUS=grandchild {helper.pid}")
            case "exit":
                sys.exit(int(value))
            case "until-sigterm":
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
                notify("READY=1")
                threading.Event().wait()
            case "forever":
                threading.Event().wait()


if __name__ == "__main__":
    main()
