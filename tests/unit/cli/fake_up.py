"""A supervisor in a process of its own, for tests that kill it: prints the children's ids and waits to be ended.

With a second argument, a module, they are forked.
"""

import asyncio
import os
import sys
from pathlib import Path

from pdserve.cli.supervisor.fork_server import ForkServer
from pdserve.cli.supervisor.spec import ProcessEvent, ProcessSpec, ProcessStarted
from pdserve.cli.supervisor.supervisor import supervising

FAKE_SERVICE = str(Path(__file__).with_name("fake_service.py"))


async def main(log_dir: Path, module: str | None) -> None:
    pids = []

    def on_event(event: ProcessEvent) -> None:
        if isinstance(event, ProcessStarted):
            pids.append(event.pid)

    specs = [
        ProcessSpec(
            name=name,
            argv=(sys.executable, *(("-m", module) if module else (FAKE_SERVICE,)), *steps),
            environment=dict(os.environ),
            log_path=log_dir / f"{name}.log",
            is_forked=module is not None,
        )
        for name, steps in {
            "polite": ["until-sigterm"],
            "stubborn": ["ignore-sigterm", "notify=READY=1", "forever"],
        }.items()
    ]
    forks = ForkServer((sys.executable,), ("json",), dict(os.environ), log_dir / "forks.log") if module else None
    async with supervising(on_event) as supervisor:
        supervisor.fork_from(forks)
        if forks is not None:
            forks.prepare([])
        await supervisor.start(*specs)
        if forks is not None:
            assert forks.pid is not None
            pids.append(forks.pid)
        print(*pids, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
