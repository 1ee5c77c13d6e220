"""A supervisor in a process of its own, for tests that kill it: prints the children's ids and waits to be ended."""

import asyncio
import os
import sys
from pathlib import Path

from pdserve.cli.supervisor.spec import ProcessEvent, ProcessSpec, ProcessStarted
from pdserve.cli.supervisor.supervisor import supervising

FAKE_SERVICE = str(Path(__file__).with_name("fake_service.py"))


async def main(log_dir: Path) -> None:
    pids = []

    def on_event(event: ProcessEvent) -> None:
        if isinstance(event, ProcessStarted):
            pids.append(event.pid)

    specs = [
        ProcessSpec(
            name=name,
            argv=(sys.executable, FAKE_SERVICE, *steps),
            environment=dict(os.environ),
            log_path=log_dir / f"{name}.log",
        )
        for name, steps in {
            "polite": ["until-sigterm"],
            "stubborn": ["ignore-sigterm", "notify=READY=1", "forever"],
        }.items()
    ]
    async with supervising(on_event) as supervisor:
        await supervisor.start(*specs)
        print(*pids, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
