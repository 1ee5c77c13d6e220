"""A process that owns a cluster of fake services: prints the ids of all its processes, then does what it is called for.

`owner.py MODEL stop|raise|wait`. The working directory has the services.
"""

import asyncio
import os
import signal
import sys

import psutil

# As in an interactive session: `pdserve up` then takes the services of the working directory.
sys.path.insert(0, os.getcwd())

from pdserve.base.errors import SetupError
from pdserve.llm.private_cluster import PrivateCluster


async def main() -> None:
    cluster = PrivateCluster(sys.argv[1], {"fork_workers": False})
    statuses: list[str] = []
    try:
        await cluster.start(statuses.append)
    except SetupError as error:
        print(error, flush=True)
        return
    finally:
        if not statuses:
            print("no status", flush=True)
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    if sys.argv[2] == "wait":
        await asyncio.Event().wait()
    if sys.argv[2] == "raise":
        raise RuntimeError("the script fails")
    await cluster.stop()
    await cluster.stop()
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)


if __name__ == "__main__":
    # As a terminal starts it: what a shell starts in the background ignores Ctrl-C, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main())
